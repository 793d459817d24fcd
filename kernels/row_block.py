"""The layers of a block over the rows of a pass on a CPU, in one call.

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
from typing import Any

import torch
from torch import Tensor

from sigma0.kernels.native import function, structure
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


class Block:
    """The layers over planes, as the functions in C++ see them; it keeps alive what it points to.

    Args:
        layers: The layers.
        shape: What they share.
        planes: Keys and values of each layer, `[planes, positions, H_kv, d]`, contiguous.
        tables: cos and sines of all positions, the first half of the sines with its sign turned, `[P, d]`.
        places: Where cache positions lie; its rows are not looked at.

    Attributes:
        address: Of the structure.

    Raises:
        ValueError: For K/V of another dtype, or heads that are too wide.
    """

    def __init__(
        self,
        layers: Sequence[BlockLayer],
        shape: BlockShape,
        planes: Sequence[tuple[Tensor, Tensor]],
        tables: tuple[Tensor, Tensor],
        places: RowPlaces,
    ) -> None:
        for kept in planes:
            check_planes(torch.float32, *kept)
        # a weight may be given other memory; what it is now stays
        weights = [
            part.detach()
            for own in layers
            for part in (own.norm, own.qkv, own.out, own.mlp_norm, own.gate_up, own.down)
        ]
        behind = [norm.detach() for own in layers for norm in own.norms_behind]
        keys, values = ([kept[side] for kept in planes] for side in range(2))
        call = (keys, values, weights, behind, *tables, places.count)
        parts = places.blocks, places.starts, places.seen
        self._held = call, parts
        self._structure, self._layers = _filled(*call, *parts, *vars(shape).values())
        self.address = ctypes.addressof(self._structure)


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
        layers: As `Block` has it; likewise
        shape: this, and
        planes: these, which are written.
        hidden: float32 `[R, D]`.
        tables: As `Block` has it.
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
    *shared: Any,
) -> Tensor:
    # bound to a name, since the compiled function sees their memory only
    numbers = [part.contiguous() for part in (positions, sequences, cache_positions, planes)]
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format).copy_(hidden)
    block, _layers = _filled(keys, values, weights, norms_behind, cos, sin, *shared)
    memory = ctypes.addressof(block), output.data_ptr(), *(part.data_ptr() for part in numbers)
    if not _block()(*memory, len(hidden)):
        raise RuntimeError(f"a position is not in a rotary table of {cos.shape[0]}")
    return output


def _filled(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    norms_behind: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    count: int,
    blocks: Tensor | None,
    starts: Tensor | None,
    seen: Tensor | None,
    head_dim: int,
    kv_heads: int,
    epsilon: float,
    scaling: float,
) -> tuple[Any, "array[int]"]:
    """The structure, and the pointers that it points to."""
    check_head_dim(head_dim)
    layers, total = array("q"), keys[0].shape[1]
    for index in range(len(keys)):
        parts = *weights[6 * index : 6 * index + 6], keys[index], values[index]
        layers.extend([part.data_ptr() for part in parts + tuple(norms_behind[2 * index : 2 * index + 2])])
        layers.extend([0, 0] if not norms_behind else [])
    tables = {"blocks": blocks, "starts": starts, "seen": seen}
    block = structure("block")(
        count=len(keys),
        width=weights[0].shape[0],
        head_dim=head_dim,
        heads=weights[2].shape[1] // head_dim,
        kv_heads=kv_heads,
        inner=weights[5].shape[1],
        size=(total - 1) // count,
        total=total,
        table_width=0 if blocks is None else blocks.shape[1],
        seen_width=0 if seen is None else seen.shape[1],
        turns=cos.shape[0],
        threads=torch.get_num_threads(),
        epsilon=epsilon,
        scaling=scaling,
        layers=layers.buffer_info()[0],
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        **{name: None if part is None else part.data_ptr() for name, part in tables.items()},
    )
    return block, layers


@lru_cache
def _block() -> Callable[..., bool]:
    return function("run_block", "ppppppn", "f")


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
    "Tensor? blocks, Tensor? starts, Tensor? seen, int head_dim, int kv_heads, float epsilon, "
    "float scaling) -> Tensor"
)
_LIBRARY.impl("run_block", _run_block, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::run_block", _output_shape, lib=_LIBRARY)
