"""The layers of a block over few rows of a pass on a CPU, in one call.

Of each layer, with norms n and the residual h:

    q, k, v  = rotary(n(h) W_qkv)          k, v go to the plane of the row's loop
    h       += n'(attention(q, K, V) W_out)
    h       += n'(silu(n(h) W_gate) * (n(h) W_up) W_down)

n' is a norm or nothing. Norm, attention and products are those of `row_norm.py`, `row_attention.py` and
`row_dot.py`, whose references stand there; the reference of the whole is the layer in torch
(`sigma0.models.ouro_block`), some thirty calls a layer.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels.cpp_library import load
from sigma0.kernels.row_attention import RowPlaces, check_planes, compiled_attention

_SOURCES = "row_dot.cpp row_norm.cpp row_block.cpp"


@dataclass(frozen=True)
class BlockLayer:
    """Weights of a layer, float32 and contiguous.

    Attributes:
        norm: Ahead of attention, `[D]`.
        qkv: Queries, keys and values packed, `[(H + 2 H_kv) d, D]`.
        out: `[D, H d]`.
        norm_behind: Behind attention, `[D]`; None for none.
        mlp_norm: Ahead of the MLP, `[D]`.
        gate_up: Gate and up packed, `[2 F, D]`.
        down: `[D, F]`.
        mlp_norm_behind: Behind the MLP, `[D]`; None for none.
    """

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm_behind: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_norm_behind: Tensor | None


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
    """Runs the layers over rows, whose K/V they write.

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
        IndexError: If a position is not in the tables.
        ValueError: For K/V of another dtype.
    """
    hidden = hidden.clone(memory_format=torch.contiguous_format)
    # bound to names, since the compiled function sees their memory only
    positions = positions.contiguous()
    own = [part.contiguous() for part in (rows.sequences, rows.cache_positions, rows.planes)]
    pointers = array("q")
    for layer, kept in zip(layers, planes, strict=True):
        check_planes(hidden.dtype, *kept)
        pointers.extend([0 if part is None else part.data_ptr() for part in (*vars(layer).values(), *kept)])
    cos, sin = tables
    keys, first = planes[0][0], layers[0]
    places = (*own, rows.blocks, rows.starts, rows.seen, rows.exits)
    widths = [0 if part is None else part.shape[1] for part in (rows.blocks, rows.seen, rows.exits)]
    attention = compiled_attention(torch.float32, shape.head_dim)
    ran = _compiled()(
        ctypes.cast(attention, ctypes.c_void_p),  # type: ignore[arg-type]
        pointers.buffer_info()[0],
        len(layers),
        hidden.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        *(None if part is None else part.data_ptr() for part in places),
        *hidden.shape,
        shape.head_dim,
        first.out.shape[1] // shape.head_dim,
        shape.kv_heads,
        first.down.shape[1],
        (keys.shape[1] - 1) // rows.count,
        keys.shape[1],
        *widths,
        shape.epsilon,
        shape.scaling,
        torch.get_num_threads(),
        cos.shape[0],
    )
    if not ran:
        raise IndexError(f"positions up to {int(positions.max())} are not in a rotary table of {cos.shape[0]}")
    return hidden


@lru_cache
def _compiled() -> Callable[..., bool]:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [
        pointer,
        pointer,
        number,
        *[pointer] * 11,
        *[number] * 11,
        ctypes.c_double,
        ctypes.c_double,
        number,
        number,
    ]
    return load(_SOURCES, "run_block", arguments, {"ELEMENT": "float", "BFLOAT16": 0}, ctypes.c_bool)
