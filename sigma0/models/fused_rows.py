"""The layers of a block over the rows of a pass in fused kernels, whose rows do not depend on each other's company.

A layer is row_qkv, attention, row_linear, row_norm, row_mlp, row_norm (`sigma0.kernels`): eight launches, where calls
of modules take some twenty, and libraries choose how they add up by the number of rows. Where a layer's outputs are not
normed, sums take the place of the two row_norm.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sigma0.decode.model import BatchRows
from sigma0.decode.ops import ROW_DTYPES, BlockLayer, BlockShape
from sigma0.models.ouro_block import OuroDecoderLayer, OuroRMSNorm, PreNormDecoderLayer
from sigma0.models.row_linear import is_plain

# A class of another kind may compute something else.
_LAYERS = (PreNormDecoderLayer, OuroDecoderLayer)


def can_fuse(layers: Iterable[Any], hidden: Tensor) -> bool:
    """Whether the kernels compute what the layers would: these are as they were made, and lie packed."""
    if hidden.dtype not in ROW_DTYPES or torch.is_grad_enabled():
        return False
    return all(_is_as_made(layer, hidden.dtype) for layer in layers)


def _is_as_made(layer: Any, dtype: torch.dtype) -> bool:
    if type(layer) not in _LAYERS:
        return False
    own = layer._modules
    attention, mlp, norms = own["self_attn"], own["mlp"], [own[name] for name in layer.norm_names]
    if not all(map(is_plain, (layer, attention, mlp, *norms))) or any(type(norm) is not OuroRMSNorm for norm in norms):
        return False
    # the functions see the memory of a weight only
    for norm in norms:
        weight = norm._parameters["weight"]
        if weight.dtype is not dtype or not weight.is_contiguous():
            return False
    # SiLU by its class: transformers names it by the config's `hidden_act`
    silu = type(mlp._modules["act_fn"]).__name__ in ("SiLU", "SiLUActivation") and is_plain(mlp._modules["act_fn"])
    products = layer.packed_weights()
    for product, modules in products:
        matrix = product.matrix(modules)
        if matrix is None or matrix.dtype is not dtype:
            return False
    return silu


def run_in_one_call(
    layers: Sequence[Any], hidden: Tensor, rows: BatchRows, tables: tuple[Tensor, Tensor]
) -> Tensor | None:
    """As `run_fused`, on a CPU; None where norms differ in their epsilon."""
    parts, epsilons = [], set()
    for layer in layers:
        own = layer._modules
        norms = [own[name] for name in layer.norm_names]
        epsilons |= {norm.variance_epsilon for norm in norms}
        ahead, ahead_of_mlp = own["input_layernorm"], own["post_attention_layernorm"]
        behind = () if layer.post_norms is None else tuple(own[name].weight for name in layer.post_norms)
        attention = own["self_attn"]
        parts.append(
            BlockLayer(
                ahead.weight,
                attention.qkv.weight,
                attention.out.weight,
                ahead_of_mlp.weight,
                layer.gate_up.weight,
                layer.down.weight,
                behind,
            )
        )
    if len(epsilons) > 1:
        return None
    head_dim = attention.head_dim
    # counted from what there is, since a rank of several has a part of the heads
    kv_heads = attention.qkv.weight.shape[0] // head_dim // (attention.num_key_value_groups + 2)
    return rows.run_block(parts, BlockShape(head_dim, kv_heads, epsilons.pop(), attention.scaling), hidden, tables)


def run_fused(layers: Iterable[Any], hidden: Tensor, rows: BatchRows, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """One loop of the layers over rows, before the norm.

    Args:
        layers: For which `can_fuse`.
        hidden: `[R, D]`.
        rows: The rows.
        cos: Of all positions (`RotaryTable`), `[P, d]`.
        signed_sin: Likewise.

    Returns:
        `[R, D]`.
    """
    ops, multiply = rows.ops, rows.ops.product(hidden.dtype)
    assert ops.norm_rows is not None and ops.mlp_rows is not None
    for index, layer in enumerate(layers):
        own = layer._modules
        attention = own["self_attn"]
        before, before_mlp = (_norm_of(own[name]) for name in ("input_layernorm", "post_attention_layernorm"))
        query = rows.project(index, hidden, *before, attention.qkv.weight, cos, signed_sin)
        attended = rows.attend(index, query, None, None, attention.scaling)
        output = attention.out(attention._modules, attended.flatten(1), multiply)
        behind = layer.post_norms and [_norm_of(own[name]) for name in layer.post_norms]
        hidden = ops.norm_rows(output, *behind[0], hidden) if behind else hidden + output
        transformed = ops.mlp_rows(hidden, layer.gate_up.weight, layer.down.weight, *before_mlp)
        hidden = ops.norm_rows(transformed, *behind[1], hidden) if behind else hidden + transformed
    return hidden


def _norm_of(module: Any) -> tuple[Tensor, float]:
    """Weight and epsilon."""
    return module._parameters["weight"], module.variance_epsilon
