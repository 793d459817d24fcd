"""The references of the kernels for few rows are what a layer of the model, its planes and a step compute."""

import pytest
import torch

from sigma0.decode.ops import TORCH
from sigma0.decode.planes import LayerPlanes
from sigma0.kernels.row_gated import row_gated_reference
from sigma0.kernels.row_linear import row_parts_reference
from sigma0.kernels.row_norm_kernel import row_norm_reference, row_residual_reference
from sigma0.kernels.row_qkv import row_qkv_reference
from sigma0.models.ouro_block import rms_norm, rotated
from tests.reference import tiny_model

ROWS = 5


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request):
    with torch.inference_mode():
        yield tiny_model(1).to(request.param)


def rows_of(model):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, model.config.hidden_size, generator=generator).to(model.dtype)


def assert_close(result, expected):
    step = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(result, expected, rtol=step, atol=step)


def test_query_key_and_value_are_those_of_a_layer(model):
    layer, hidden = model.model.layers[1], rows_of(model)
    attention, norm = layer.self_attn, layer.input_layernorm
    positions, places = torch.tensor([0, 3, 3, 200, 17]), torch.tensor([4, 25, 0, 12, 7])
    normed = rms_norm(norm, hidden, TORCH)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, keys, values = (part(normed).view(ROWS, -1, attention.head_dim) for part in projections)
    at = model.model._rotary_table.rows(positions, 256, hidden)
    planes, ours = (LayerPlanes(keys.transpose(0, 1), 3, 1, 8) for _ in range(2))
    planes.write(places, rotated(keys, *at), values)
    weight = torch.cat([part.weight for part in projections])
    tables = model.model._rotary_table.reserve(256, hidden)
    result = row_qkv_reference(normed, weight, *tables, positions, ours.flat_keys, ours.flat_values, places)
    assert_close(result, rotated(query, *at))
    assert_close(ours.flat_keys, planes.flat_keys)
    assert_close(ours.flat_values, planes.flat_values)
    assert planes.flat_keys.abs().sum() > 0


def test_the_mlp_is_that_of_a_layer(model):
    layer, hidden = model.model.layers[0], rows_of(model)
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    normed = rms_norm(norm, hidden, TORCH)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    expected, down = mlp(normed), mlp.down_proj.weight
    parts = row_parts_reference(row_gated_reference(normed, gate_up), down)
    assert_close(parts.sum(0).to(expected.dtype), expected)
    after, ahead = layer.post_attention_layernorm_2, layer.input_layernorm
    summed = rms_norm(after, expected, TORCH, hidden)
    epsilons = after.variance_epsilon, ahead.variance_epsilon
    result = row_residual_reference(parts, after.weight, hidden, ahead.weight, epsilons)
    assert_close(result[0], summed)
    assert_close(result[1], rms_norm(ahead, summed, TORCH))
    assert_close(row_residual_reference(parts, None, hidden, None, epsilons)[1], hidden + expected)


def test_the_norm_is_that_of_a_layer(model):
    hidden, norm = rows_of(model), model.model.layers[0].input_layernorm_2
    for residual in (None, hidden.flip(0)):
        expected = rms_norm(norm, hidden, TORCH, residual)
        assert_close(row_norm_reference(hidden, norm.weight, norm.variance_epsilon, residual), expected)
