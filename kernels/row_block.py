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

import torch
from torch import Tensor

from sigma0.kernels.native import function, structure
from sigma0.kernels.row_attention import RowPlaces, check_head_dim, check_planes


@dataclass(frozen=True)
class BlockLayer:
    """Weights of a layer, float32 and contiguous."""

    norm: Tensor  # Ahead of attention, `[D]`
    qkv: Tensor  # Queries, keys and values packed, `[(H + 2 H_kv) d, D]`
    out: Tensor  # `[D, H d]`
    mlp_norm: Tensor  # Ahead of the MLP, `[D]`
    gate_up: Tensor  # Gate and up packed, `[2 F, D]`
    down: Tensor  # `[D, F]`
    # After attention and after the MLP, `[D]`; of all layers or of none
    norms_behind: tuple[Tensor, Tensor] | tuple[()]


@dataclass(frozen=True)
class BlockShape:
    """What all layers of a block share."""

    head_dim: int  # d
    kv_heads: int  # H_kv
    epsilon: float  # Of every norm
    scaling: float  # Factor on the scores


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
        check_head_dim(shape.head_dim)
        pointers, first = array("q"), layers[0]
        # a weight may be given other memory; what it is now stays
        self._held: list[object] = [places, *tables]
        for current, (keys, values) in zip(layers, planes, strict=True):
            check_planes(torch.float32, keys, values)
            weights = current.norm, current.qkv, current.out, current.mlp_norm, current.gate_up, current.down
            parts = [part.detach() for part in (*weights, keys, values, *current.norms_behind)]
            pointers.extend([part.data_ptr() for part in parts] + ([] if current.norms_behind else [0, 0]))
            self._held += parts
        self._held.append(pointers)
        total, (cos, sin) = planes[0][0].shape[1], tables
        blocks, starts, seen = places.blocks, places.starts, places.seen
        self._structure = structure("block")(
            count=len(layers),
            width=first.norm.shape[0],
            head_dim=shape.head_dim,
            heads=first.out.shape[1] // shape.head_dim,
            kv_heads=shape.kv_heads,
            inner=first.down.shape[1],
            size=(total - 1) // places.count,
            total=total,
            table_width=0 if blocks is None else blocks.shape[1],
            seen_width=0 if seen is None else seen.shape[1],
            turns=cos.shape[0],
            threads=torch.get_num_threads(),
            epsilon=shape.epsilon,
            scaling=shape.scaling,
            layers=pointers.buffer_info()[0],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            **{
                name: None if part is None else part.data_ptr()
                for name, part in (("blocks", blocks), ("starts", starts), ("seen", seen))
            },
        )
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
    """Runs the layers over rows, whose K/V they write.

    Args:
        layers: As `Block` has it; likewise
        shape: this, and
        planes: these, which are written.
        hidden: float32 `[R, D]`.
        tables: As `Block` has it.
        positions: Position of each row for the tables, int64 `[R]`.
        rows: Where the rows are.

    Returns:
        `[R, D]`.

    Raises:
        RuntimeError: If a position is not in the tables.
        ValueError: For K/V of another dtype.
    """
    block = Block(layers, shape, planes, tables, rows)
    # bound to a name, since the compiled function sees their memory only
    numbers = [part.contiguous() for part in (positions, rows.sequences, rows.cache_positions, rows.planes)]
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format).copy_(hidden)
    memory = block.address, output.data_ptr(), *(part.data_ptr() for part in numbers)
    if not _block()(*memory, len(hidden)):
        raise RuntimeError(f"a position is not in a rotary table of {len(tables[0])}")
    return output


@lru_cache
def _block() -> Callable[..., bool]:
    return function("run_block", "ppppppn", "f")
