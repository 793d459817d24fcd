"""Weights and logits that are no numbers are named: at load, and while they are decoded with."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import sigma0
from sigma0.checkpoints import CHECKPOINTS
from sigma0.decode.logits import check_weights, flag_broken
from sigma0.models.load import load_causal
from tests.reference import tiny_model
from tests.test_cli import refused, run

BROKEN = "model.layers.0.mlp.up_proj.weight"
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped model, and what changes one of its numbers."""
    target = tmp_path / "copy"
    shutil.copytree(CHECKPOINTS / "pocket", target)

    def change(value, dtype=torch.float32):
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(target / "model.safetensors").items()}
        tensors[BROKEN][3, 4] = value
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return str(target)

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "value, count", [(torch.nan, "1 NaN and 0 infinite"), (torch.inf, "0 NaN and 1"), (-torch.inf, "0 NaN and 1")]
)
def test_a_weight_that_is_no_number_is_named_at_load(folder, value, count, dtype):
    path = folder(value, dtype)
    for load in (sigma0.load, load_causal):
        with pytest.raises(ValueError, match=f"{BROKEN} holds {count}.* check=False") as caught:
            load(path, device="cpu")
        assert "\n" not in str(caught.value)
    model, _ = sigma0.load(path, device="cpu", check=False)
    assert not model.get_parameter(BROKEN).isfinite().all()


def test_the_largest_numbers_of_a_dtype_are_sound():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = torch.nn.Linear(64, 64, dtype=dtype)
        torch.nn.init.constant_(layer.weight, torch.finfo(dtype).max)
        check_weights(layer)


def test_numbers_that_another_dtype_cannot_hold_are_named(folder):
    with pytest.raises(ValueError, match=r"infinite numbers of 32768 as float16.*another dtype"):
        sigma0.load(folder(1e30), device="cpu", dtype="float16")


def test_the_command_line_ends_in_one_line(folder):
    path = folder(torch.nan)
    said = refused("generate", "Mary went", "--model", path)
    assert BROKEN in said and "--no-check" in said
    for options in ([], ["--json"], ["--after", "verify"], ["--temperature", "0.7"]):
        result = run("generate", "Mary went", "--model", path, "--no-check", *options)
        assert result.exit_code == 2 and "depth_saved" not in result.stdout, "nothing was saved where nothing was said"
        assert result.stderr.splitlines()[-1].startswith("error: the model's logits are NaN or infinite")


@pytest.fixture(scope="module")
def broken():
    """A model that is sound until its head is read."""
    model = tiny_model(seed=0)
    with torch.no_grad():
        model.lm_head.weight[2] = torch.nan
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True},
        {"repetition_penalty": 1.2},
        {"output_statistics": True},
        {"exit_config": {"mode": "margin", "after_exit": "verify"}},
        {"exit_config": {"mode": "margin", "after_exit": "verify"}, "do_sample": True},
        {"exit_config": {"after_exit": "drop"}},
        {"logits_processor": [lambda ids, scores: scores], "inputs": IDS.repeat(2, 1)},
    ],
)
def test_every_way_of_generating_notices(broken, settings):
    with pytest.raises(FloatingPointError, match="logits are NaN or infinite"):
        broken.generate(**{"inputs": IDS, "max_new_tokens": 4, "eos_token_id": None, **settings})


def test_a_forward_of_one_token_notices(broken):
    cache = broken.new_cache()
    assert broken(IDS, past_key_values=cache).logits.isnan().any(), "a prompt's logits are the caller's to look at"
    with pytest.raises(FloatingPointError):
        broken(IDS[:, :1], past_key_values=cache)


def test_what_turns_to_nan_only_later_is_noticed(pocket):
    model = copy.deepcopy(pocket[0])
    tokens = sigma0.stream(model, pocket[1], "Mary went to the park. Where is Mary?")
    assert next(tokens).depth >= 1
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    with pytest.raises(FloatingPointError):
        list(tokens)


def test_minus_infinity_alone_is_no_fault():
    logits = torch.tensor([[0.0, -torch.inf], [torch.nan, 0.0], [-torch.inf, -torch.inf], [torch.inf, 0.0]])
    assert flag_broken(torch.tensor([0, 1, 0, 0]), logits).tolist() == [0, -1, -1, -1]
