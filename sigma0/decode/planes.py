"""K/V planes of every layer in blocks: plane t holds all that was written at loop t.

A layer's keys are one tensor `[planes, positions + 1, H_kv, d]`, its values another. A sequence's cache position c lies
at `block_table[sequence, c // block_size] * block_size + c % block_size`. The last position is nobody's: rows that only
fill up a bucket write there. A plain cache is the case of one block for each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sigma0.config import CODA_PLANES
from sigma0.decode.model import KVShape
from sigma0.decode.ops import PlaneCodec, copy_past_exits, runs_triton

# Of the planes of a coda's layer.
READ, FINAL = 0, 1


@dataclass(frozen=True)
class BlockShape:
    """What a block of a model takes.

    Attributes:
        layers: L.
        planes: T.
        kv_heads: H_kv.
        head_dim: d.
        size: Cache positions.
        stages: Layers of a prelude, with one plane each, and of a coda, with two.
    """

    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    size: int
    stages: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, model: KVShape, size: int) -> "BlockShape":
        """Of a model's configuration."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(model.num_block_layers, model.num_loops, config.num_key_value_heads, head_dim, size, model.stages)

    @property
    def counts(self) -> list[int]:
        """Planes of each layer."""
        return [*[self.planes] * self.layers, *extra_planes(self.stages)]

    def bytes_with(self, dtype: torch.dtype, codec: PlaneCodec | None = None) -> int:
        """Bytes of a block's keys and values over all layers and planes.

        Args:
            dtype: Of numbers that are stored as they are computed.
            codec: How those of the loops are stored; None: as they are computed.
        """
        if codec is not None:
            return 2 * self.layers * self.kv_heads * codec.head_bytes(self.head_dim) * self.size
        return 2 * sum(self.counts) * self.kv_heads * self.head_dim * self.size * dtype.itemsize

    def count_in(
        self, kv_bytes: int, dtype: torch.dtype, codec: PlaneCodec | None = None, tail_positions: int = 0
    ) -> int:
        """Blocks that so many bytes hold.

        Args:
            kv_bytes: Memory.
            dtype: Of numbers that are stored as they are computed.
            codec: How blocks are stored; None: as they are computed.
            tail_positions: Cache positions that are kept as they are computed beside coded blocks.

        Raises:
            ValueError: If that is none.
        """
        block_bytes = self.bytes_with(dtype, codec)
        tail_bytes = self.bytes_with(dtype) * tail_positions // self.size
        if kv_bytes < block_bytes + tail_bytes:
            beside = f", and the segments under way take {tail_bytes} bytes" if tail_bytes else ""
            raise ValueError(f"{kv_bytes} bytes of K/V hold no block: one takes {block_bytes} bytes{beside}")
        return (kv_bytes - tail_bytes) // block_bytes


def extra_planes(stages: tuple[int, int]) -> list[int]:
    """Planes of the layers of a prelude and of a coda."""
    prelude, coda = stages
    return [1] * prelude + [CODA_PLANES] * coda


class LayerPlanes:
    """Keys and values of one layer for every loop.

    Args:
        like: Keys to be written, `[..., H_kv, S, d]`, for heads, width, dtype and device.
        planes: Loops to keep planes for.
        blocks: Number of blocks.
        size: Cache positions of a block.

    Attributes:
        flat_keys: `[planes, blocks * size + 1, H_kv, d]`, zero where nothing was written.
        flat_values: As `flat_keys`.
    """

    def __init__(self, like: Tensor, planes: int, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        shape = (planes, blocks * size + 1, like.shape[-3], like.shape[-1])
        self.flat_keys, self.flat_values = _zeros(like, shape), _zeros(like, shape)

    @property
    def keys(self) -> Tensor:
        """Keys by block, `[planes, blocks, H_kv, size, d]`, a view."""
        return self._by_block(self.flat_keys)

    @property
    def values(self) -> Tensor:
        """Values by block, as `keys`."""
        return self._by_block(self.flat_values)

    @property
    def room(self) -> int:
        """Cache positions that a block holds."""
        return self.size

    @property
    def position_bytes(self) -> int:
        """Bytes that one cache position of all blocks takes, keys and values."""
        planes, _, heads, width = self.flat_keys.shape
        return 2 * planes * self.blocks * heads * width * self.flat_keys.element_size()

    @property
    def bytes_allocated(self) -> int:
        """Bytes that are reserved for cache positions."""
        return self.position_bytes * self.size

    def bytes_of(self, length: int) -> int:
        """Bytes that the first `length` cache positions of all blocks take."""
        return self.position_bytes * length

    def write_span(self, plane: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Writes K/V `[blocks, H_kv, N, d]` of every block from a cache position on."""
        stop = start + keys.shape[2]
        self.keys[plane, :, :, start:stop] = keys.detach()
        self.values[plane, :, :, start:stop] = values.detach()

    def read_span(self, plane: int, stop: int) -> tuple[Tensor, Tensor]:
        """K/V of a plane before a cache position, `[blocks, H_kv, stop, d]` each."""
        return self.keys[plane, :, :, :stop], self.values[plane, :, :, :stop]

    def grow(self, size: int) -> None:
        """Makes every block larger and keeps what is there."""
        grown = LayerPlanes(self.keys, len(self.flat_keys), self.blocks, size)
        grown.keys[:, :, :, : self.size] = self.keys
        grown.values[:, :, :, : self.size] = self.values
        self.flat_keys, self.flat_values, self.size = grown.flat_keys, grown.flat_values, size

    def select(self, blocks: Tensor) -> None:
        """Keeps these blocks, `[N]`, in this order."""
        index = blocks.to(self.flat_keys.device)
        selected = LayerPlanes(self.keys, len(self.flat_keys), len(index), self.size)
        selected.keys.copy_(self.keys.index_select(1, index))
        selected.values.copy_(self.values.index_select(1, index))
        self.flat_keys, self.flat_values, self.blocks = selected.flat_keys, selected.flat_values, len(index)

    def write(self, flat_rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes the K/V `[R, H_kv, d]` of rows.

        Args:
            flat_rows: plane * (positions + 1) + position, int64 `[R]`.
            keys: `[R, H_kv, d]`.
            values: `[R, H_kv, d]`.
        """
        for planes, new in ((self.flat_keys, keys), (self.flat_values, values)):
            planes.view(-1, *planes.shape[2:]).index_copy_(0, flat_rows, new)

    def propagate_past_exit(self, positions: Tensor, planes: Tensor) -> None:
        """Copies the K/V of positions from the last plane that was written to all deeper ones (`drop`).

        Args:
            positions: Flat positions, int64 `[N]`.
            planes: Last plane of each, counted from 0, int64 `[N]`.
        """
        positions, planes = (index.to(self.flat_keys.device) for index in (positions, planes))
        targets = torch.arange(1, len(self.flat_keys), device=planes.device)[:, None]  # [T - 1, 1]
        sources = torch.minimum(targets, planes)  # a plane up to the last is copied to itself
        for tensor in (self.flat_keys, self.flat_values):
            tensor[targets, positions] = tensor[sources, positions]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros."""
        size, begin = self.size, 0
        for count, block in enumerate(blocks, start=1):
            # blocks that follow each other at once
            if count == len(blocks) or blocks[count] != block + 1:
                for flat in (self.flat_keys, self.flat_values):
                    flat[:, blocks[begin] * size : (block + 1) * size].zero_()
                begin = count

    def _by_block(self, flat: Tensor) -> Tensor:
        by_block = flat[:, :-1].view(len(flat), self.blocks, self.size, *flat.shape[2:])
        return by_block.transpose(2, 3)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # zeros, not empty: a masked NaN would still poison the weighted sum. Never an inference tensor: a cache may be
    # continued outside of torch.inference_mode
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


# Where the K/V of layers lie, int64 `[L, 2]`, as long as the first of them is there: captured steps read it.
_ADDRESSES: WeakKeyDictionary[LayerPlanes, tuple[tuple[int, ...], Tensor]] = WeakKeyDictionary()


def propagate_past_exits(layers: Sequence[LayerPlanes], positions: Tensor, planes: Tensor) -> None:
    """`LayerPlanes.propagate_past_exit` of all layers: in one launch on a GPU, where all lie on one."""
    first, device = layers[0], layers[0].flat_keys.device
    apart = any(layer.flat_keys.device != device for layer in layers)
    if apart or torch.compiler.is_compiling() or not runs_triton(device):
        for layer in layers:
            layer.propagate_past_exit(positions, planes)
        return
    where = tuple(part.data_ptr() for layer in layers for part in (layer.flat_keys, layer.flat_values))
    if first not in _ADDRESSES or _ADDRESSES[first][0] != where:
        _ADDRESSES[first] = where, torch.tensor(where, dtype=torch.int64, device=device).view(-1, 2)
    copy_past_exits(_ADDRESSES[first][1], first.flat_keys, positions.to(device), planes.to(device))
