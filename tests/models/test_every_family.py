"""What every family does alike, from a folder: saved, exported, piped, scored, quantised, sized, calibrated, served."""

import json
from functools import partial

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, pipeline

import sigma0
from sigma0 import models
from tests.models.raven_reference import SHAPES, save_raven
from tests.reference import tiny_model, tiny_nanbeige
from tests.serve.conftest import served
from tests.test_cli import run

STORY = "Mary went to the park. The hat is with Mary. Where is the hat?"
RULES = ({"mode": "full"}, {"mode": "margin", "theta": 0.1}, {"mode": "margin", "theta": 0.1, "after_exit": "verify"})
# of weights that int4 takes
WIDTHS = {"intermediate_size": 64, "head_dim": 16}
# a family whose config has other names than Llama's needs a line in `folder`
FAMILIES = (*(name for name in models.FAMILIES if name != "huginn_raven"), *SHAPES)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory, pocket):
    """A small random model with the tokenizer of `pocket`."""
    target, tokenizer = tmp_path_factory.mktemp(request.param), pocket[1]
    if request.param in SHAPES:
        return save_raven(target, tokenizer, request.param, 5, n_embd=64, block_size=512, **WIDTHS)
    build = {"ouro": tiny_model}.get(request.param, partial(tiny_nanbeige, family=request.param))
    model = build(5, vocab_size=len(tokenizer), hidden_size=64, max_position_embeddings=512, **WIDTHS)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def loaded(folder, **settings):
    return sigma0.load(str(folder), device="cpu", **settings)


def texts(model, tokenizer):
    return [sigma0.generate(model, tokenizer, STORY, max_new_tokens=8, exit_config=rule).text for rule in RULES]


def invoke(*arguments):
    result = run(*map(str, arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.grid(fast=2, slow=3)
def test_it_saves_what_it_loaded_and_exports_it(folder, tmp_path):
    model, tokenizer = loaded(folder)
    full, _, checked = expected = texts(model, tokenizer)
    assert full == checked
    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    invoke("export", folder, tmp_path / "exported")
    assert texts(*loaded(tmp_path / "exported")) == expected
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    base = AutoModel.from_pretrained(tmp_path / "exported", dtype=model.dtype)
    assert type(again) is type(model)
    names = json.loads((tmp_path / "exported" / "config.json").read_text())["auto_map"]
    assert names["AutoModelForCausalLM"] == f"shim.{type(model).__name__}"
    assert names["AutoModel"] == f"shim.{type(model.base_model).__name__}"
    ids = torch.tensor([[5, 9, 30, 2, 8]])
    with torch.no_grad():
        assert torch.equal(base(ids).loop_states, model.base_model(ids).loop_states)


@pytest.mark.grid(fast=2, slow=3)
def test_a_pipeline_writes_what_generate_writes(folder):
    model, tokenizer = loaded(folder)
    generator, settings = pipeline("text-generation", model=model, tokenizer=tokenizer), {"do_sample": False}
    messages = [{"role": "user", "content": STORY}]
    (chat,) = generator(messages, max_new_tokens=4, **settings)
    obtained = [chat["generated_text"][-1]["content"]]
    batch = generator([STORY, "John"], max_new_tokens=4, batch_size=2, return_full_text=False, **settings)
    obtained += [row[0]["generated_text"] for row in batch]
    (rich,) = generator(STORY, max_new_tokens=4, return_dict_in_generate=True, return_full_text=False, **settings)
    prompts = (messages, STORY, "John", STORY)
    expected = [sigma0.generate(model, tokenizer, prompt, max_new_tokens=4).text for prompt in prompts]
    assert [*obtained, rich["generated_text"]] == expected


@pytest.mark.grid(fast=0, slow=2)
def test_lm_eval_scores_what_the_model_says(folder):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    model, tokenizer = loaded(folder, dtype="float32")
    backend = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    asked = [("Mary went to", " the park."), ("Where is", " Mary?")]
    obtained = backend.loglikelihood([Instance("loglikelihood", {}, item, 0, ("task", 0, 1)) for item in asked])
    for (context, continuation), (score, _) in zip(asked, obtained, strict=True):
        before = tokenizer(context)["input_ids"]
        ids = torch.tensor([[*before, *tokenizer(continuation, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            chances = model(ids).logits[0].log_softmax(-1)
        picked = chances[len(before) - 1 : -1].gather(1, ids[0, len(before) :, None])
        assert score == pytest.approx(float(picked.sum()), abs=1e-3)
    request = Instance("generate_until", {}, ("Mary went", {"until": ["."], "max_gen_toks": 5, "do_sample": False}), 0)
    (text,) = backend.generate_until([request])
    assert text == sigma0.generate(model, tokenizer, "Mary went", max_new_tokens=5).text.split(".")[0]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_quantised(folder, tmp_path, quantization):
    pytest.importorskip("torchao")
    model, tokenizer = loaded(folder, quantization=quantization)
    full, _, checked = texts(model, tokenizer)
    assert full == checked
    rounded = {name for name, weight in model.named_parameters() if type(weight.detach()).__name__.startswith("Int")}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert rounded == linear - {"lm_head.weight", "model.early_exit_gate.weight"}
    if quantization == "int8":
        model.save_pretrained(tmp_path / "rounded")
        tokenizer.save_pretrained(tmp_path / "rounded")
        assert texts(*loaded(tmp_path / "rounded"))[0] == full


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 56])
def test_rows_that_the_kernel_cannot_read_are_left_to_torchao(tmp_path, pocket, width):
    """torch 2.13 ends the process where a row of int8 is no multiple of 16."""
    pytest.importorskip("torchao")
    folder = save_raven(tmp_path / "odd", pocket[1], "pre", 5, intermediate_size=width)
    full, _, checked = texts(*loaded(folder, quantization="int8"))
    assert full == checked


def test_it_is_sized_as_it_is_made(folder):
    reported = json.loads(invoke("size", folder, "--dtype", "float32", "--recurrence", 2, "--json"))
    model, _ = loaded(folder, dtype="float32", recurrence=2)
    assert reported["weights"] == sum(item.nbytes for item in model.parameters())
    assert reported["shape"]["loops"] == model.num_loops == 2


@pytest.mark.grid(fast=2, slow=3)
def test_it_is_served(folder):
    model, tokenizer = loaded(folder)
    with served((model, tokenizer)) as server:
        rule = RULES[1]
        answer = server.client.completions.create(
            model="pocket", prompt=STORY, max_tokens=8, temperature=0, extra_body={"sigma0": {"exit": rule}}
        )
        assert (
            answer.choices[0].text == sigma0.generate(model, tokenizer, STORY, max_new_tokens=8, exit_config=rule).text
        )
        described = server.app.openapi()["components"]["schemas"]["Sigma0Options"]["properties"]["exit"]["anyOf"]
        modes = {item["properties"]["mode"]["const"] for item in described if item["type"] == "object"}
        assert "margin" in modes and ("qexit" in modes) == model.has_gate
        if not model.has_gate:
            assert all("mode" in item["required"] for item in described if item["type"] == "object")
            with pytest.raises(openai.BadRequestError, match="reads a gate"):
                server.client.completions.create(
                    model="pocket", prompt=STORY, max_tokens=2, extra_body={"sigma0": {"exit": {"mode": "qexit"}}}
                )


@pytest.mark.grid(fast=0, slow=1)
def test_it_is_calibrated(folder, tmp_path):
    exported = tmp_path / "own"
    invoke("export", folder, exported)
    lines = [json.dumps({"prompt": f"Where is {name} {number}?"}) for name in ("Mary", "John") for number in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--exit", "margin", "--agreement", "0.3", "--confidence", "0.6", "--max-new-tokens", "2"]
    invoke("calibrate", exported, "--prompts", tmp_path / "prompts.jsonl", "--device", "cpu", *arguments)
    model, _ = loaded(exported)
    assert model.exit_thresholds.margin is not None
    assert model.resolve_exit_config(None).mode == "margin"
