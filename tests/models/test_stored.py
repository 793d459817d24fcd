"""Absurd checkpoints end in one line that names the field, before memory is taken for them."""

import json
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sigma0
from sigma0.checkpoints import CHECKPOINTS
from tests.conftest import Golden
from tests.models.raven_reference import save_raven
from tests.test_cli import refused

HUGE = 10**9
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(CHECKPOINTS / "pocket", tmp_path / "copy")


@pytest.fixture(scope="module")
def families(tmp_path_factory, pocket):
    """A checkpoint of each family."""
    nanbeige = Golden("nanbeige-a", tmp_path_factory.mktemp("nanbeige")).folder
    shutil.copy(CHECKPOINTS / "pocket" / "tokenizer.json", nanbeige)
    raven = save_raven(tmp_path_factory.mktemp("raven"), pocket[1], "pre", 73)
    return {"ouro": CHECKPOINTS / "pocket", "nanbeige": nanbeige, "raven": raven}


def write(folder, file, **values):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


ABSURD = {
    "ouro": [
        ({"total_ut_steps": HUGE}, "total_ut_steps must be at most 4096, got 1000000000"),
        ({"total_ut_steps": -1}, "total_ut_steps must be at least 1, got -1"),
        ({"total_ut_steps": True}, "'total_ut_steps' expected int, got bool"),
        ({"hidden_act": "nosuch"}, "hidden_act='nosuch' is no activation"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' with value '</s>'"),
        ({"pad_token_id": 5000}, "pad_token_id must lie in 0 to vocab_size - 1 = 743, got 5000"),
        ({"dtype": "foo"}, "dtype='foo' in config.json is no floating-point dtype"),
        ({"dtype": "int8"}, "dtype='int8' in config.json is no floating-point dtype"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a finite number of at least 0, got -1.0"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_type 'foo' is not known"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
            "rope_theta must be a finite number above 0",
        ),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is no multiple of num_key_value_heads=4"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"head_dim": -4}, "head_dim must be at least 1, got -4"),
        ({"head_dim": 33}, "even rotary dimension"),
        ({"vocab_size": -4}, "vocab_size must be at least 1, got -4"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, got 0"),
        ({"vocab_size": 500}, "vocab_size = 500, but embed_tokens.weight has shape [744, 128]"),
        ({"vocab_size": 10**12}, "vocab_size = 1000000000000, but embed_tokens.weight has shape [744, 128]"),
        ({"hidden_size": HUGE}, "hidden_size = 1000000000, but embed_tokens.weight has shape [744, 128]"),
        ({"num_attention_heads": 8}, "num_attention_heads * head_dim = 256, but layers.0.self_attn.q_proj.weight"),
        ({"intermediate_size": 7}, "intermediate_size = 7, but layers.0.mlp.gate_proj.weight has shape [256, 128]"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers = 1000000000, but the weights are missing from layers.1 on"),
        ({"_attn_implementation": "org/kernel"}, "_attn_implementation = 'org/kernel', which is code from the hub"),
        ({"experts_implementation": "org/kernel"}, "experts_implementation = 'org/kernel', which is code from the hub"),
        ({"attn_implementation": "flash_attention_2"}, "FlashAttention2 has been toggled on"),
        ({"num_labels": HUGE}, "num_labels = 1000000000, which continue no text"),
        ({"id2label": 3}, "'int' object has no attribute 'items' (in its config.json)"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True, which no looped model has"),
        ({"return_dict": False}, "return_dict = false"),
        ({"use_sliding_window": True, "sliding_window": 64}, "only full attention is supported"),
        ({"layer_types": ["sliding_attention"]}, "only full attention is supported"),
        ({"early_exit_threshold": 1.5}, "got 1.5"),
        ({"early_exit_step": 6}, "below 6, got 6"),
        ({"hidden_size": "32"}, "'hidden_size' expected int"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic' changes",
        ),
        ({"rope_parameters": LONGROPE}, "rope_type 'longrope' changes its frequencies"),
    ],
    "nanbeige": [
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_loops": 0}, "num_loops must be at least 1, got 0"),
        ({"num_loops": 10**9}, "num_loops must be at most 4096, got 1000000000"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' changes its frequencies"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0"),
        ({"head_dim": 26}, "num_attention_heads * head_dim = 104, but layers.0.self_attn.q_proj.weight has shape"),
        ({"loop_share_kv": True}, "loop_share_kv=True would share K/V between loops"),
        ({"skip_loop_final_norm": "no"}, "'skip_loop_final_norm' expected bool"),
        ({"layer_types": ["sliding_attention"]}, "only full attention is supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys in `rope_parameters`"),
        ({"num_hidden_layers": 1}, "config.json has num_hidden_layers = 1, but the weights have "),
        ({"model_type": "nosuch"}, "model type `nosuch`"),
    ],
    "raven": [
        ({"num_key_value_heads": 3}, "n_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 1}, "(n_heads + 2 num_key_value_heads) head_dim = 48, but transformer.core_block.0"),
        ({"mean_recurrence": 0}, "mean_recurrence must lie in 1 to"),
        ({"stride": 3}, "stride must divide the 4 loops of full depth, got 3"),
        ({"injection_type": "add"}, "injection_type='add' is not implemented, only 'linear'"),
        ({"bias": True}, "bias=True is not implemented"),
        ({"nonlin_name": "ReLU2"}, "nonlin_name='ReLU2' is not implemented"),
        ({"test_time_noise": 1}, "test_time_noise=1 is not implemented"),
        ({"initial_state_mode": "ones"}, "initial_state_mode must be random"),
        ({"init_scale": -1.0}, "init_scale must be a finite number"),
        ({"n_embd": 0}, "n_embd must be at least 1"),
        ({"n_embd": 128}, "n_embd = 128"),
        ({"intermediate_size": 80}, "2 intermediate_size = 160"),
        ({"n_layers_in_coda": -1}, "n_layers_in_coda must be at least 0"),
        ({"n_layers_in_coda": 1}, "n_layers_in_coda = 1, but the weights have 2 such layers"),
        ({"n_layers_in_coda": 3}, "n_layers_in_coda = 3"),
        ({"padded_vocab_size": 10}, "padded_vocab_size=10 is below vocab_size"),
        ({"block_layout": "round"}, "block_layout must be sandwich, pre, post"),
        ({"qk_bias": True}, "qk_bias=True has no place in blocks of the 'pre' layout"),
        ({"norm_eps": -1.0}, "norm_eps must be"),
        ({"pad_token_id": 4096}, "pad_token_id must lie in"),
        ({"auto_map": "file"}, "auto_map must be a mapping, got 'file'"),
        ({"init_values": {"embed_scale": "large"}}, "init_values: embed_scale must be a finite number, got 'large'"),
        ({"sigma0_prompts": "poems"}, "sigma0_prompts must be instructions or bare, got 'poems'"),
    ],
}


@pytest.mark.parametrize(
    "family, values, message", [(family, *case) for family, cases in ABSURD.items() for case in cases]
)
def test_an_absurd_config_is_one_line(families, tmp_path, family, values, message):
    folder = shutil.copytree(families[family], tmp_path / "copy")
    write(folder, "config.json", **values)
    began = time.process_time()
    said = refused("generate", "Mary went", "--model", str(folder))
    assert time.process_time() - began < 10, "a second on a quiet machine; hours where it is really tried"
    assert message in said
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        sigma0.load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"eos_token_id": "</s>"}, "generation_config.json has eos_token_id = '</s>', which is no token id"),
        ({"eos_token_id": [2, True]}, "which is no token id"),
        ({"pad_token_id": -5}, "pad_token_id = -5, which is no token id"),
        ({"forced_eos_token_id": HUGE}, "outside of the model's vocabulary of 744"),
        ({"num_beams": 10**6}, "generation_config.json has num_beams = 1000000, which is for a call to ask"),
        ({"num_return_sequences": 2}, "num_return_sequences = 2"),
        ({"watermarking_config": {"bias": 2.0}}, "watermarking_config = {'bias': 2.0}"),
        ({"token_healing": True}, "token_healing = True"),
        ({"cache_implementation": "hybrid"}, "cache_implementation = 'hybrid'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3"),
        ({"max_time": "x"}, "max_time = 'x', which is no number"),
        ({"do_sample": "false"}, "do_sample = 'false', which is neither true nor false"),
        ({"temperature": "hot"}, "generation_config.json: `temperature` (=hot)"),
        ({"repetition_penalty": 0}, "generation_config.json: `penalty` has to be"),
        ({"bad_words_ids": [[HUGE]]}, "generation_config.json: The model vocabulary size is 744"),
        ({"exponential_decay_length_penalty": "x"}, "generation_config.json: can only concatenate"),
        ({"exit_config": {"mode": "nosuch"}}, "generation_config.json: exit_config: mode: Input should be 'full'"),
        ({"exit_config": {"tetha": 0.5}}, "generation_config.json: exit_config: tetha: Unexpected keyword argument"),
        ({"exit_config": {"mode": "fixed", "depth": 99}}, "depth=99 exceeds the model's 6 loops"),
        (
            {"door_policy": {"tau_c": 7}},
            "generation_config.json: door_policy: tau_c: Input should be less than or equal to 1",
        ),
        ({"fate_config": {"spiral": 0}}, "generation_config.json: fate_config: spiral: must lie in"),
    ],
)
def test_bad_settings_of_a_checkpoint_are_named_at_load(folder, values, message):
    write(folder, "generation_config.json", **values)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        sigma0.load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_generation_config_that_cannot_be_read_is_not_ignored(folder):
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is no JSON"):
        sigma0.load(str(folder), device="cpu")
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_config_nested_beyond_reason_is_one_line(folder):
    (folder / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(ValueError, match="could not be loaded"):
        sigma0.load(str(folder), device="cpu")


def change(folder, **tensors):
    """Replaces tensors of the file by name; None takes one out."""
    held = load_file(folder / "model.safetensors") | {name.replace("__", "."): value for name, value in tensors.items()}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_that_do_not_fit_are_named(folder):
    change(folder, model__norm__weight=None, model__bogus=torch.zeros(3))
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; unexpected: model\.bogus"):
        sigma0.load(str(folder), device="cpu")
    change(folder, model__bogus=torch.zeros(3, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"model\.bogus is stored as I8"):
        AutoModelForCausalLM.from_pretrained(folder)
    change(folder, model__bogus=None, lm_head__weight=torch.zeros(744, 128, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"lm_head\.weight is stored as I32"):
        sigma0.load(str(folder), device="cpu")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model\.safetensors' could not be loaded: no whole safetensors file"):
        sigma0.load(str(folder), device="cpu")


def test_a_caller_may_have_other_shapes_than_the_weights(folder):
    write(folder, "config.json", intermediate_size=40)
    model = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert model.config.intermediate_size == 40


def test_a_raven_without_an_adapter_is_named(families, tmp_path):
    folder = shutil.copytree(families["raven"], tmp_path / "copy")
    change(folder, transformer__adapter__weight=None)
    with pytest.raises(ValueError, match=r"the checkpoint has no transformer\.adapter\.weight"):
        sigma0.load(str(folder), device="cpu")


def test_a_tokenizer_of_another_model_is_refused(folder):
    held = load_file(folder / "model.safetensors")
    names = ("lm_head.weight", "model.embed_tokens.weight")
    change(folder, **{name: held[name][:500].clone() for name in names})
    write(folder, "config.json", vocab_size=500)
    with pytest.raises(ValueError, match=r"has ids up to 743, but its config.json has vocab_size = 500"):
        sigma0.load(str(folder), device="cpu")


@pytest.mark.parametrize(
    "file, message",
    [
        ("../weights.safetensors", "'../weights.safetensors', which is no file of its folder"),
        ("{folder}/../weights.safetensors", "which is no file of its folder"),
        ("sub/weights.safetensors", "which is no file of its folder"),
        ("..", "which is no file of its folder"),
        (3, "3, which is no file of its folder"),
        ("absent.safetensors", "'absent.safetensors', which is missing"),
    ],
)
def test_an_index_names_files_of_its_own_folder(folder, file, message):
    weights = folder / "model.safetensors"
    names, target = list(load_file(weights)), folder.parent / "weights.safetensors"
    weights.rename(target)
    file = file.format(folder=folder) if isinstance(file, str) else file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    for load in (sigma0.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(str(folder))
    for text in ("x", "[]", "{}"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            sigma0.load(str(folder))
    target.rename(folder / "weights.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "weights.safetensors")}))
    assert sigma0.load(str(folder))[0].num_loops == 6
