"""The layers of a block over the rows of a pass on a CPU, in one call.

Of each layer, with norms n and the residual h:

    q, k, v  = rotary(n(h) W_qkv)          k, v go to the plane of the row's loop
    h       += n'(attention(q, K, V) W_out)
    h       += n'(silu(n(h) W_gate) * (n(h) W_up) W_down)

n' is a norm or nothing. Norm, attention and products are those of `row_norm.py`, `row_attention.py` and
`row_dot.py`, whose references stand there; the reference of the whole is the layer in torch
(`sigma0.models.ouro_block`), some thirty calls a layer.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sigma0.kernels.native import function
from sigma0.kernels.row_attention import RowPlaces, check_head_dim, check_planes


@dataclass(frozen=True)
class BlockLayer:
    """Weights of a layer, float32 and contiguous.

    Attributes:
        norm: Ahead of attention, `[D]`.
        qkv: Queries, keys and values packed, `[(H + 2 H_kv) d, D]`.
        out: `[D, H d]`.
        mlp_norm: Ahead of the MLP, `[D]`.
        gate_up: Gate and up packed, `[2 F, D]`.
        down: `[D, F]`.
        norms_behind: Behind attention and behind the MLP, `[D]`; of all layers or of none.
    """

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norms_behind: tuple[Tensor, Tensor] | tuple[()]


@dataclass(frozen=True)
class BlockShape:
    """What all layers of a block share.

    Attributes:
        head_dim: d.
        kv_heads: H_kv.
        epsilon: Of every norm.
        scaling: Factor on the scores.
    """

    head_dim: int
    kv_heads: int
    epsilon: float
    scaling: float


def run_block(
    layers: Sequence[BlockLayer],
    shape: BlockShape,
    planes: Sequence[tuple[Tensor, Tensor]],
    hidden: Tensor,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    rows: RowPlaces,
) -> Tensor:
    """Runs the layers over rows, whose K/V they write, by the operator `sigma0::run_block`.

    Args:
        layers: The layers.
        shape: What they share.
        planes: Keys and values of each layer, `[planes, positions, H_kv, d]`, contiguous; written.
        hidden: float32 `[R, D]`.
        tables: cos and sines of all positions, the first half of the sines with its sign turned, `[P, d]`.
        positions: Position of each row for the tables, int64 `[R]`, contiguous.
        rows: Where the rows are.

    Returns:
        `[R, D]`.

    Raises:
        RuntimeError: If a position is not in the tables.
        ValueError: For K/V of another dtype.
    """
    for kept in planes:
        check_planes(hidden.dtype, *kept)
    run = torch.ops.sigma0.run_block if torch.compiler.is_compiling() else _run_block
    output: Tensor = run(
        [keys for keys, _ in planes],
        [values for _, values in planes],
        [part for own in layers for part in (own.norm, own.qkv, own.out, own.mlp_norm, own.gate_up, own.down)],
        [norm for own in layers for norm in own.norms_behind],
        hidden,
        *tables,
        positions,
        rows.sequences,
        rows.cache_positions,
        rows.planes,
        rows.count,
        rows.blocks,
        rows.starts,
        rows.seen,
        rows.exits,
        shape.head_dim,
        shape.kv_heads,
        shape.epsilon,
        shape.scaling,
    )
    return output


def _run_block(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    norms_behind: Sequence[Tensor],
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    sequences: Tensor,
    cache_positions: Tensor,
    planes: Tensor,
    count: int,
    blocks: Tensor | None,
    starts: Tensor | None,
    seen: Tensor | None,
    exits: Tensor | None,
    head_dim: int,
    kv_heads: int,
    epsilon: float,
    scaling: float,
) -> Tensor:
    check_head_dim(head_dim)
    # bound to names, since the compiled function sees their memory only
    positions, sequences = positions.contiguous(), sequences.contiguous()
    cache_positions, planes = cache_positions.contiguous(), planes.contiguous()
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format).copy_(hidden)
    layers, total = array("q"), keys[0].shape[1]
    for index in range(len(keys)):
        parts = *weights[6 * index : 6 * index + 6], keys[index], values[index]
        layers.extend([part.data_ptr() for part in parts + tuple(norms_behind[2 * index : 2 * index + 2])])
        layers.extend([0, 0] if not norms_behind else [])
    rows, width = hidden.shape
    ran = _block()(
        layers.buffer_info()[0],
        len(keys),
        output.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        sequences.data_ptr(),
        cache_positions.data_ptr(),
        planes.data_ptr(),
        None if blocks is None else blocks.data_ptr(),
        None if starts is None else starts.data_ptr(),
        None if seen is None else seen.data_ptr(),
        None if exits is None else exits.data_ptr(),
        rows,
        width,
        head_dim,
        weights[2].shape[1] // head_dim,
        kv_heads,
        weights[5].shape[1],
        (total - 1) // count,
        total,
        0 if blocks is None else blocks.shape[1],
        0 if seen is None else seen.shape[1],
        0 if exits is None else exits.shape[1],
        epsilon,
        scaling,
        torch.get_num_threads(),
        cos.shape[0],
    )
    if not ran:
        raise RuntimeError(f"a position is not in a rotary table of {cos.shape[0]}")
    return output


@lru_cache
def _block() -> Callable[..., bool]:
    return function("run_block", "pn" + 11 * "p" + 11 * "n" + "ddnn", "f")


def _output_shape(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    norms_behind: Sequence[Tensor],
    hidden: Tensor,
    *rest: Any,
) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


_LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "run_block(Tensor(a!)[] keys, Tensor(b!)[] values, Tensor[] weights, Tensor[] norms_behind, Tensor hidden, "
    "Tensor cos, Tensor sin, Tensor positions, Tensor sequences, Tensor cache_positions, Tensor planes, int count, "
    "Tensor? blocks, Tensor? starts, Tensor? seen, Tensor? exits, int head_dim, int kv_heads, float epsilon, "
    "float scaling) -> Tensor"
)
_LIBRARY.impl("run_block", _run_block, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::run_block", _output_shape, lib=_LIBRARY)
