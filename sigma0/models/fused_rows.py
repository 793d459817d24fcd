"""The layers of a block over the rows of a pass in fused kernels, whose rows do not depend on each other's company.

A layer is row_qkv, attention, row_linear, row_norm, row_mlp, row_norm (`sigma0.kernels`): eight launches, where calls
of modules take some twenty, and libraries choose how they add up by the number of rows.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sigma0.decode.model import BatchRows
from sigma0.decode.ops import ROW_DTYPES
from sigma0.models.ouro_block import OuroDecoderLayer, OuroRMSNorm
from sigma0.models.row_linear import is_plain

_NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


def can_fuse(layers: Iterable[Any], hidden: Tensor) -> bool:
    """Whether the kernels compute what the layers would: these are as they were made, and lie packed."""
    if hidden.dtype not in ROW_DTYPES or torch.is_grad_enabled():
        return False
    return all(_is_as_made(layer) for layer in layers)


def _is_as_made(layer: Any) -> bool:
    if type(layer) is not OuroDecoderLayer:
        return False
    own = layer._modules
    attention, mlp, norms = own["self_attn"], own["mlp"], [own[name] for name in _NORMS]
    if not all(map(is_plain, (layer, attention, mlp, *norms))) or any(type(norm) is not OuroRMSNorm for norm in norms):
        return False
    # SiLU by its class: transformers names it by the config's `hidden_act`
    silu = type(mlp._modules["act_fn"]).__name__ in ("SiLU", "SiLUActivation") and is_plain(mlp._modules["act_fn"])
    products = layer.packed_weights()
    return silu and all(product.matrix(modules) is not None for product, modules in products)


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
        before, after, before_mlp, after_mlp = (
            (own[name]._parameters["weight"], own[name].variance_epsilon) for name in _NORMS
        )
        query = rows.project(index, hidden, *before, attention.qkv.weight, cos, signed_sin)
        attended = rows.attend(index, query, None, None, attention.scaling)
        output = attention.out(attention._modules, attended.flatten(1), multiply)
        hidden = ops.norm_rows(output, *after, hidden)
        transformed = ops.mlp_rows(hidden, layer.gate_up.weight, layer.down.weight, *before_mlp)
        hidden = ops.norm_rows(transformed, *after_mlp, hidden)
    return hidden
