import json
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaForCausalLM

import sigma0
from sigma0.bench.pocket import structured
from sigma0.bench.pocket.forms import TOKENS
from sigma0.checkpoints import resolve_model
from sigma0.models.load import load_causal, resolve_device
from tests.reference import tiny_llama


def test_shipped_models_load_by_name(pocket):
    model, tokenizer = pocket
    assert "pocket" in sigma0.shipped_models()
    assert not model.training
    assert model.lm_head.weight.dtype is torch.float32
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("name", sigma0.shipped_models())
def test_the_shipped_models_share_their_tokenizer(name, pocket):
    model, tokenizer = sigma0.load(name, device="cpu", dtype="float32")
    # The files, since a loaded tokenizer also remembers how it padded last.
    current, first = (
        json.loads((Path(resolve_model(model)) / "tokenizer.json").read_bytes()) for model in (name, "pocket-raven")
    )
    # three models have tokens more: the solver those of the forms, the others all pieces
    added = [token["content"] for token in current["added_tokens"][len(first["added_tokens"]) :]]
    assert {**current, "added_tokens": current["added_tokens"][: len(first["added_tokens"])]} == first
    taught = [*TOKENS, *structured.TOKENS, *structured.CODE_TOKENS, *structured.QUOTED_TOKENS]
    more = {"pocket-raven": [], "pocket-solver": list(TOKENS)}.get(name, list(dict.fromkeys(taught)))
    assert added == more
    messages = [{"role": "user", "content": "Where is Mary?"}, {"role": "assistant", "content": "In the park."}]
    texts = [one.apply_chat_template(messages, tokenize=False) for one in (tokenizer, pocket[1])]
    assert texts[0] == texts[1]
    assert model.num_loops >= pocket[0].num_loops


def test_dtype_and_folder(pocket, tmp_path):
    model, tokenizer = pocket
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokens = sigma0.load(str(tmp_path), device="cpu", dtype=torch.bfloat16)
    assert again.lm_head.weight.dtype is torch.bfloat16
    assert tokens("Mary 123").input_ids == tokenizer("Mary 123").input_ids


@pytest.mark.parametrize("name", ["nothing", "./nowhere", "/no/such/folder", "a/b/c", ""])
def test_unknown_names_list_the_choices_and_hub_ids_are_known(name):
    with pytest.raises(ValueError, match=r"no such model: .*pocket.*ByteDance/Ouro-1.4B"):
        resolve_model(name)
    assert resolve_model("ByteDance/Ouro-1.4B") == "ByteDance/Ouro-1.4B"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"backend": "triton"}, "needs a CUDA device, got cpu"),
        ({"backend": "cuda"}, "no such backend: 'cuda'"),
        ({"quantization": "int2"}, "no such quantization: 'int2'; there are int8, int4"),
        ({"quantization": "int4", "dtype": "float32"}, "int4' has kernels for bfloat16 alone, got dtype 'float32'"),
        ({"quantization": "int8", "tensor_parallel": True}, "goes with one process"),
        ({"door_rule": "trust"}, "rule: Input should be 'confidence' or 'certificate'"),
        ({"recurrence": 0}, "total_ut_steps must be at least 1, got 0"),
        ({"recurrence": 2.5}, "recurrence must be a whole number, got 2.5"),
        ({"stride": 2}, "^stride=2 cannot be set for 'pocket': a pass of ouro models runs one loop"),
        ({"recurrence": 4, "stride": 1}, "^recurrence=4 and stride=1 cannot be set for 'pocket': a pass of ouro"),
    ],
)
def test_settings_that_a_model_cannot_have_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sigma0.load("pocket", **{"device": "cpu"} | settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device 'cuda' cannot be used"):
        resolve_device("cuda")


@pytest.mark.parametrize("hangs", [False, True])
def test_an_unreachable_hub_id_is_one_clear_error(hangs, monkeypatch):
    """Whether a name is not known at once, or looked for without end."""
    released = threading.Event()

    def look_up(*args, **kwargs):
        released.wait(60 * hangs)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    with pytest.raises(
        ValueError, match=r"'nobody/no-such-model' could not be loaded: .+ does not answer, .*"
    ) as error:
        sigma0.load("nobody/no-such-model")
    released.set()
    assert time.monotonic() - began < 5 and "\n" not in str(error.value)


def test_what_the_cache_holds_loads_without_network(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    held = tmp_path / "models--some--pocket"
    shutil.copytree(resolve_model("pocket"), held / "snapshots" / ("0" * 40))
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-2, "no")))
    model, tokenizer = sigma0.load("some/pocket")
    assert sigma0.generate(model, tokenizer, "Mary went to the park. Where is Mary?").text == " Mary is in the park."
    assert "Loading weights" not in capfd.readouterr().err


def test_folders_that_are_no_checkpoints(tmp_path, tiny):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        sigma0.load(str(tmp_path))
    tiny.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        sigma0.load(str(tmp_path))


@pytest.mark.parametrize("name", ["x.gguf", "models/x.GGUF", "org/x.gguf"])
def test_gguf_is_refused_by_its_name(name, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for given in (name, str(tmp_path / "x.gguf")):
        with pytest.raises(ValueError, match=r"is a GGUF file, .* give a folder with config\.json.*safetensors"):
            sigma0.load(given)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a file: give a folder"):
        sigma0.load(str(tmp_path / "model.safetensors"))


def test_a_model_that_reads_prompts_in_both_directions_is_refused(tmp_path, pocket):
    hrm = pytest.importorskip("transformers.models.hrm_text")
    config = hrm.HrmTextConfig(
        vocab_size=len(pocket[1]), hidden_size=16, intermediate_size=24, num_layers_per_stack=1, num_attention_heads=2,
        head_dim=8,
    )  # fmt: skip
    hrm.HrmTextForCausalLM(config).save_pretrained(tmp_path)
    pocket[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a 'hrm_text' model: its prompts attend in both directions") as error:
        sigma0.load(str(tmp_path))
    assert "\n" not in str(error.value)


def test_models_without_loops_are_refused(tmp_path, pocket):
    tiny_llama(0, 20).save_pretrained(tmp_path)
    pocket[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a 'llama' model, which has no loops to skip"):
        sigma0.load(str(tmp_path))
    model, tokenizer = load_causal(str(tmp_path), dtype="float32")
    assert type(model) is LlamaForCausalLM and not model.training and tokenizer.padding_side == "left"
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"could not be loaded: it holds no safetensors, only pytorch_model\.bin"):
        load_causal(str(tmp_path))


def test_a_rule_of_the_door_and_a_backend_are_asked_for():
    model, tokenizer = sigma0.load("pocket", door_rule="certificate", device="cpu", backend="torch")
    assert model.door_policy == replace(sigma0.load("pocket")[0].door_policy, rule="certificate")
    assert sigma0.generate(model, tokenizer, "Where is Mary?", max_new_tokens=2).policy == model.door_policy
    assert (model.backend, model.operations.backend) == ("torch", "torch")
