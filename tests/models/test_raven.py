"""Parity with the published code of Huginn and of the retrofits, whose outputs are in tests/golden."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sigma0 import ExitConfig
from sigma0.models import RavenConfig, RavenForCausalLM
from tests.conftest import GOLDEN

NAMES = ("huginn-a", "huginn-m4", "retro-tinyllama", "retro-llama", "retro-olmo")
LAYOUTS = dict(zip(NAMES, ("sandwich", "sandwich", "pre", "pre", "post"), strict=True))
FULL = ExitConfig(mode="full")


class Published:
    """A published-code checkpoint written out as an ordinary folder, with its reference outputs."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        (folder / "config.json").write_text((GOLDEN / f"{name}.json").read_text())
        weights = {key.removeprefix("weights."): value for key, value in self.tensors.items() if "weights." in key}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __getitem__(self, key):
        return self.tensors[key]


@pytest.fixture(scope="session", params=NAMES)
def published(request, tmp_path_factory):
    return Published(request.param, tmp_path_factory.mktemp(request.param))


def test_the_layout_is_what_the_tensors_show(published):
    assert published.model.config.layout == LAYOUTS[published.name]


def test_every_loop_matches(published):
    with torch.no_grad():
        outputs = published.model(
            published["single.input_ids"],
            initial_state=published["single.initial_state"],
            exit_config=FULL,
            output_loop_states=True,
        )
    assert torch.allclose(outputs.logits, published["single.logits"], atol=1e-4, rtol=0)
    assert torch.allclose(outputs.loop_states, published["single.state_by_loop"], atol=1e-4, rtol=0)
    assert torch.allclose(outputs.loop_logits, published["single.logits_by_loop"], atol=1e-4, rtol=0)


def test_the_zero_state_and_its_kin_match(published):
    ids, config = published["single.input_ids"], published.model.config
    with torch.no_grad():
        assert torch.allclose(
            published.model(ids, exit_config=FULL).logits, published["zero.logits"], atol=1e-4, rtol=0
        )
        for mode in ("embed-init", "skip-adapter"):
            if f"{mode}.logits" in published.tensors:
                config.initial_state_mode = mode
                logits = published.model(ids, exit_config=FULL).logits
                config.initial_state_mode = "random"
                assert torch.allclose(logits, published[f"{mode}.logits"], atol=1e-4, rtol=0)


def greedy(published, index, **settings):
    ids = published[f"greedy.prompt{index}"][None]
    out = published.model.generate(
        ids, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, exit_config=FULL, **settings
    )
    return out.sequences[0, ids.shape[1] :]


@pytest.mark.grid(fast=7, slow=6)
@pytest.mark.parametrize("index", range(3))
def test_greedy_tokens_match(published, index):
    assert torch.equal(greedy(published, index), published["greedy.new_tokens"][index])


def test_the_stock_loop_writes_them_too(published, monkeypatch):
    from transformers.generation import GenerationMixin

    monkeypatch.setattr(type(published.model), "_sample", GenerationMixin._sample)
    assert torch.equal(greedy(published, 1), published["greedy.new_tokens"][1])


def test_a_batch_of_mixed_lengths_is_each_alone(published):
    prompts = [published[f"greedy.prompt{index}"] for index in range(3)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(each, (width - len(each), 0)) for each in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(each) for each in prompts]).long()
    out = published.model.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, exit_config=FULL, pad_token_id=0
    )
    assert torch.equal(out[:, width:], published["greedy.new_tokens"])


@pytest.mark.grid(fast=4, slow=6)
@pytest.mark.parametrize("config", [{"mode": "margin", "theta": 0.3}, {"mode": "converge", "eps": 0.5}])
def test_verify_writes_them(published, config):
    ids = published["greedy.prompt2"][None]
    out = published.model.generate(
        ids,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        exit_config=ExitConfig(after_exit="verify", **config),
    )
    assert torch.equal(out.sequences[0, ids.shape[1] :], published["greedy.new_tokens"][2])
    assert out.loop_passes < published.model.num_loops * 23


def test_a_saved_model_is_the_same(published, tmp_path):
    published.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, RavenForCausalLM)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" not in stored
    for name in ("block_layout", "mean_recurrence", "rope_parameters", "tie_word_embeddings", "num_key_value_heads"):
        assert getattr(again.config, name) == getattr(published.model.config, name)
    ids = published["single.input_ids"]
    with torch.no_grad():
        assert torch.equal(again(ids, exit_config=FULL).logits, published.model(ids, exit_config=FULL).logits)


def test_transformers_finds_embeddings_and_head(published):
    model = published.model
    assert model.get_input_embeddings() is model.transformer.wte and model.get_output_embeddings() is model.lm_head
    assert (model.lm_head.weight is model.transformer.wte.weight) == model.config.tie_embeddings


def test_recurrence_is_a_setting(published):
    """Nothing depends on the loop's index: fewer loops are the published code with as many."""
    loops = published.model.num_loops // 2
    published.model.config.recurrence = loops
    try:
        with torch.no_grad():
            outputs = published.model(
                published["single.input_ids"], initial_state=published["single.initial_state"], exit_config=FULL
            )
    finally:
        published.model.config.recurrence = None
    assert torch.allclose(outputs.logits, published["single.logits_by_loop"][loops - 1], atol=1e-4, rtol=0)


def test_there_is_no_gate(published):
    with pytest.raises(ValueError, match="reads a gate, which huginn_raven models do not have: use margin"):
        published.model.resolve_exit_config(ExitConfig(q=0.5))
    assert published.model.resolve_exit_config(None).mode == "full"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 3, "n_heads=4 is no multiple of num_key_value_heads=3"),
        ("mean_recurrence", 0, "mean_recurrence must lie in 1 to"),
        ("stride", 3, "stride must divide the 4 loops"),
        ("injection_type", "add", "injection_type='add' is not implemented, only 'linear'"),
        ("bias", True, "bias=True is not implemented"),
        ("nonlin_name", "ReLU2", "nonlin_name='ReLU2' is not implemented"),
        ("test_time_noise", 0.1, "test_time_noise=0.1 is not implemented"),
        ("initial_state_mode", "ones", "initial_state_mode must be random"),
        ("init_scale", -1.0, "init_scale must be a finite number"),
        ("n_embd", 0, "n_embd must be at least 1"),
        ("n_layers_in_coda", -1, "n_layers_in_coda must be at least 0"),
        ("padded_vocab_size", 10, "padded_vocab_size=10 is below vocab_size"),
        ("block_layout", "round", "block_layout must be sandwich, pre, post"),
        ("qk_bias", True, "qk_bias=True has no place in blocks of the 'pre' layout"),
        ("norm_eps", -1.0, "norm_eps must be"),
        ("pad_token_id", 4096, "pad_token_id must lie in"),
    ],
)
def test_a_wrong_config_names_its_field(field, value, message):
    config = json.loads((GOLDEN / "retro-tinyllama.json").read_text())
    with pytest.raises(Exception, match=message):
        RavenConfig(**config | {"block_layout": "pre"} | {field: value})


def test_what_does_not_fit_the_weights_is_named(published, tmp_path):
    for path in published.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for field, value, message in (
        ("n_layers_in_coda", config["n_layers_in_coda"] + 1, "n_layers_in_coda"),
        ("intermediate_size", 80, "2 intermediate_size = 160"),
        ("n_embd", 128, "n_embd = 128"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.adapter.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no transformer\.adapter\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
