"""The layers of a block over the rows of a pass in fused kernels, whose rows do not depend on each other's company.

A layer is row_qkv, attention, row_parts, row_residual, row_gated, row_parts, row_residual (`sigma0.kernels`): seven
launches, where calls of modules take some twenty, and libraries choose how they add up by the number of rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sigma0.decode.attention import PassRows
from sigma0.decode.ops import ROW_DTYPES, BlockLayer, BlockShape, Operations
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
    current = layer._modules
    attention, mlp, norms = current["self_attn"], current["mlp"], [current[name] for name in layer.norm_names]
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


def block_of(layers: Sequence[Any]) -> tuple[list[BlockLayer], BlockShape] | None:
    """Weights of layers for which `can_fuse`, for one call on a CPU; None where norms differ in their epsilon."""
    parts, epsilons = [], set()
    for layer in layers:
        current = layer._modules
        norms = [current[name] for name in layer.norm_names]
        epsilons |= {norm.variance_epsilon for norm in norms}
        ahead, ahead_of_mlp = current["input_layernorm"], current["post_attention_layernorm"]
        following = () if layer.post_norms is None else tuple(current[name].weight for name in layer.post_norms)
        attention = current["self_attn"]
        parts.append(
            BlockLayer(
                ahead.weight,
                attention.qkv.weight,
                attention.out.weight,
                ahead_of_mlp.weight,
                layer.gate_up.weight,
                layer.down.weight,
                following,
            )
        )
    if len(epsilons) > 1:
        return None
    head_dim = attention.head_dim
    # counted from what there is, since a rank of several has a part of the heads
    kv_heads = attention.qkv.weight.shape[0] // head_dim // (attention.num_key_value_groups + 2)
    return parts, BlockShape(head_dim, kv_heads, epsilons.pop(), attention.scaling)


def run_fused(layers: Iterable[Any], hidden: Tensor, rows: PassRows, cos: Tensor, signed_sin: Tensor) -> Tensor:
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
    ops, layers = rows.ops, list(layers)
    assert ops.norm_rows and ops.parts_rows and ops.add_rows and ops.gate_rows
    first, epsilon = _norm_of(layers[0], "input_layernorm")
    normed = ops.norm_rows(hidden, first, epsilon)
    for index, layer in enumerate(layers):
        attention = layer._modules["self_attn"]
        following, behind_mlp = layer.post_norms or (None, None)
        after = layers[index + 1] if index + 1 < len(layers) else None
        query = rows.project(index, normed, attention.qkv.weight, cos, signed_sin)
        attended = rows.attend(index, query, None, None, attention.scaling)
        parts = ops.parts_rows(attended.flatten(1), attention.out.weight)
        hidden, normed = _added(ops, parts, (layer, following), hidden, (layer, "post_attention_layernorm"))
        gated = ops.gate_rows(normed, layer.gate_up.weight)
        parts = ops.parts_rows(gated, layer.down.weight)
        hidden, normed = _added(ops, parts, (layer, behind_mlp), hidden, (after, "input_layernorm"))
    return hidden


def _added(
    ops: Operations, parts: Tensor, following: tuple[Any, str | None], hidden: Tensor, ahead: tuple[Any, str]
) -> tuple[Tensor, Tensor]:
    """The residual with a product in parts, by the norm after it, and what the norm ahead of the next makes of it."""
    assert ops.add_rows is not None
    weight, epsilon = _norm_of(*following)
    next_weight, next_epsilon = _norm_of(*ahead)
    return ops.add_rows(parts, weight, hidden, next_weight, (epsilon, next_epsilon))


def _norm_of(layer: Any, name: str | None) -> tuple[Tensor | None, float]:
    """Weight and epsilon of a layer's norm; None where there is no layer, or no norm."""
    if layer is None or name is None:
        return None, 0.0
    module = layer._modules[name]
    return module._parameters["weight"], module.variance_epsilon
