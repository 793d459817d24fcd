"""Packed linear layers: one matrix in memory, and to everything but a pass over rows the layers that they were."""

import copy
import io

import pytest
import torch
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors.torch import load_file
from torch import nn

from sigma0.models import OuroForCausalLM
from sigma0.models.row_linear import PackedLinear, linear
from tests.reference import tiny_model

IDS = torch.tensor([[5, 6, 7, 8]])
NAMES = ("q_proj", "k_proj", "v_proj")


def packed(model):
    """Every packed matrix of a model, and the layers in it."""
    for layer in model.model.layers:
        yield layer.self_attn.qkv, [getattr(layer.self_attn, name) for name in NAMES]
        yield layer.gate_up, [layer.mlp.gate_proj, layer.mlp.up_proj]


def is_packed(model):
    return all(
        torch.equal(together.weight, torch.cat([layer.weight for layer in layers]))
        and together.weight.data_ptr() == layers[0].weight.data_ptr()
        for together, layers in packed(model)
    )


def written(model):
    return model.generate(IDS, max_new_tokens=12, exit_config={"mode": "qexit", "q": 0.5}).tolist()


@pytest.fixture
def model():
    made = tiny_model(seed=2)
    made.pack_weights()
    return made


def test_one_matrix_and_no_second_copy(model):
    plain = tiny_model(seed=2)
    assert is_packed(model)
    for (name, one), (same, other) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == same and torch.equal(one, other)
    for together, layers in packed(model):
        start, end = together.weight.data_ptr(), together.weight.data_ptr() + together.weight.nbytes
        for layer in layers:
            assert layer.weight.data_ptr() == start
            # of its own, as whatever saves or frees tensors looks at storages
            assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
            start += layer.weight.nbytes
        assert start == end
    assert len(list(model.parameters())) == len(list(plain.parameters()))


def test_a_pass_packs_a_model_that_is_not(model):
    plain = tiny_model(seed=2)
    assert not is_packed(plain)
    expected = written(plain)
    assert is_packed(plain)
    assert written(model) == expected


def test_files_are_as_before(model, tmp_path):
    tiny_model(seed=2).save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "packed"))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (
        tmp_path / "packed" / "model.safetensors"
    ).read_bytes()
    loaded = OuroForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert written(loaded) == written(model)
    # accelerate's own saving leaves tensors out that it takes for the same
    assert set(clean_state_dict_for_safetensors(model.state_dict())) == set(model.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_read(model, assign):
    other = tiny_model(seed=3)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert written(model) == written(other)
    assert is_packed(model)


def test_copies_are_independent(model):
    expected = written(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert written(twin) == expected and is_packed(twin)
    assert written(unpickled) == expected and is_packed(unpickled)


def test_moves_take_the_matrices_along(model):
    before = [together.weight for together, _ in packed(model)]
    model.to(torch.bfloat16)
    assert all(not len(together.weight) for together, _ in packed(model))
    assert written(model) == written(tiny_model(seed=2).to(torch.bfloat16))
    assert is_packed(model) and next(packed(model))[0].weight.dtype is torch.bfloat16
    model.to(torch.float32).pack_weights()
    # compiled programs hold them
    assert all(one is together.weight for one, (together, _) in zip(before, packed(model), strict=True))


def test_training_steps_are_read(model):
    plain = tiny_model(seed=2)
    for trained in (model, plain):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        trained(IDS, labels=IDS).loss.backward()
        optimizer.step()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert is_packed(model)
    assert written(model) == written(plain)


@pytest.mark.parametrize("change", ["hook", "adapter", "bias", "shared"])
def test_layers_that_stay_apart(change):
    model, plain = tiny_model(seed=2), tiny_model(seed=2)
    attention = model.model.layers[0].self_attn
    if change == "hook":
        attention.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
        plain.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    elif change == "adapter":
        attention.k_proj = nn.Sequential(attention.k_proj)
    elif change == "bias":
        attention.k_proj.bias = nn.Parameter(torch.zeros(16))
    else:
        model.share_memory()
    assert written(model) == written(plain)
    assert not len(attention.qkv.weight)
    assert all(weight.is_shared() == (change == "shared") for weight in model.parameters())


def test_gradients_go_to_the_layers():
    layers = {name: nn.Linear(8, width, bias=False) for name, width in (("one", 4), ("other", 2))}
    together, rows = PackedLinear("one", "other"), torch.randn(3, 8)
    with torch.no_grad():
        expected = torch.cat([linear(layer, rows) for layer in layers.values()], dim=1)
        # another width may be summed in another order
        torch.testing.assert_close(together(layers, rows), expected, rtol=0, atol=1e-6)
    together(layers, rows).sum().backward()
    for layer in layers.values():
        assert torch.equal(layer.weight.grad, rows.sum(0).expand_as(layer.weight))
