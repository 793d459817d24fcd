"""K/V in blocks: storage by layer and plane, and the attention of a pass's rows over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.decode.batch import Ints
from sigma0.decode.model import KVShape, RowIndices
from sigma0.decode.ops import DepthRows, Operations
from sigma0.decode.transfer import to_device


@dataclass(frozen=True)
class BlockShape:
    """What a block of a model takes.

    Attributes:
        layers: L.
        planes: T.
        kv_heads: H_kv.
        head_dim: d.
        size: Cache positions.
    """

    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    size: int

    @classmethod
    def of(cls, model: KVShape, size: int) -> "BlockShape":
        """Of a model's configuration."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(model.num_block_layers, model.num_loops, config.num_key_value_heads, head_dim, size)

    def bytes_with(self, dtype: torch.dtype) -> int:
        """Bytes of a block's keys and values over all layers and planes."""
        return 2 * self.layers * self.planes * self.kv_heads * self.head_dim * self.size * dtype.itemsize

    def count_in(self, kv_bytes: int, dtype: torch.dtype) -> int:
        """Blocks that so many bytes hold.

        Raises:
            ValueError: If that is none.
        """
        block_bytes = self.bytes_with(dtype)
        if kv_bytes < block_bytes:
            raise ValueError(f"{kv_bytes} bytes of K/V hold no block: one takes {block_bytes} bytes")
        return kv_bytes // block_bytes


class PagedPlanes:
    """Keys and values of every layer, `[T, H_kv, blocks, size, d]`.

    Args:
        shape: Of a block.
        blocks: How many.
        dtype: Of the K/V.
        device: Where they are.
    """

    def __init__(self, shape: BlockShape, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        room = (shape.planes, shape.kv_heads, blocks, shape.size, shape.head_dim)
        with torch.inference_mode(False):
            self.keys = [torch.zeros(room, dtype=dtype, device=device) for _ in range(shape.layers)]
            self.values = [torch.zeros(room, dtype=dtype, device=device) for _ in range(shape.layers)]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros."""
        index = to_device(np.array(blocks, dtype=np.int64), self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(2, index, 0)

    def propagate_past_exit(self, blocks: Tensor, offsets: Tensor, planes: Tensor) -> None:
        """Copies the K/V of some cache positions from one plane to all deeper ones, whose loops are never run.

        Args:
            blocks: Block of each cache position, int64 `[N]`.
            offsets: Offset of each in its block, `[N]`.
            planes: The last plane that was written, counted from 0, `[N]`.
        """
        targets = torch.arange(1, self.shape.planes, device=planes.device)[:, None]  # [T - 1, 1]
        sources = torch.minimum(targets, planes)  # a plane up to the last is copied to itself
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, blocks, offsets] = tensor[sources, :, blocks, offsets]


@dataclass(frozen=True)
class _Span:
    """Rows of one sequence at one plane, side by side: a stretch of a prompt.

    Attributes:
        start: First row.
        stop: One past the last.
        plane: Counted from 0.
        blocks: Of the sequence, int64 `[P]`.
        length: Cache positions that the last row sees.
        mask: Which of them each row sees, bool `[rows, length]`.
    """

    start: int
    stop: int
    plane: int
    blocks: Tensor
    length: int
    mask: Tensor


@dataclass(frozen=True)
class _Singles:
    """Rows without a neighbour at their plane: decoding and trailing rows.

    Attributes:
        rows: Their numbers, int64 `[N]`.
        index: What each sees among all (plane, head, block), padded with the sequence's first block, int64
            `[N * H_kv * P]`.
        length: Cache positions that the furthest sees.
        mask: Which of them each row sees, bool `[N, 1, 1, length]`.
    """

    rows: Tensor
    index: Tensor
    length: int
    mask: Tensor


class PagedRows:
    """The rows of one pass over blocks: `sigma0.decode.model.BatchRows`.

    Rows of one sequence at one plane must be adjacent and in the order of their cache positions.

    Args:
        planes: Storage.
        ops: Attention operations.
        sequences: Which sequence each row is of, an index into `block_tables`, `[R]`.
        block_tables: Blocks of each sequence.
        cache_positions: Cache position of each row, which is its position too, `[R]`.
        loops: Loops that each has finished: the plane that it writes, `[R]`.
        state_slots: Slot of each row's exit state, `[R]`.
    """

    def __init__(
        self,
        planes: PagedPlanes,
        ops: Operations,
        sequences: Ints,
        block_tables: Sequence[Sequence[int]],
        cache_positions: Ints,
        loops: Ints,
        state_slots: Ints,
    ) -> None:
        self.planes = planes
        self.ops = ops
        self.furthest = int(cache_positions.max())
        self.longest = self.furthest + 1
        size = planes.shape.size
        self._indices = np.stack([sequences, cache_positions, cache_positions, loops, state_slots])
        self._table = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int64)
        for row, blocks in zip(self._table, block_tables, strict=True):
            row[: len(blocks)] = blocks
            # a masked position may hold NaN, and then only the sequence that wrote it may be affected
            row[len(blocks) :] = blocks[0] if blocks else 0
        self._at = np.stack([self._table[sequences, cache_positions // size], cache_positions % size])
        self._device = planes.keys[0].device
        self._places = RowIndices(*to_device(self._indices, self._device).unbind(0))
        self._blocks, self._per_sequence = to_device(self._at, self._device).unbind(0)
        self._spans, self._singles = self._grouped(sequences, cache_positions, loops)

    def on(self, device: torch.device) -> RowIndices:
        """The indices of the rows as tensors on a device."""
        assert device == self._device, f"rows on {device} over blocks on {self._device}"
        return self._places

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `decode.model.BatchRows.attend`."""
        layer_keys, layer_values = self.planes.keys[layer], self.planes.values[layer]
        loops = self._places.loops
        layer_keys[loops, :, self._blocks, self._per_sequence] = keys
        layer_values[loops, :, self._blocks, self._per_sequence] = values
        attended = torch.empty_like(query)
        for span in self._spans:
            attended[span.start : span.stop] = _attend_span(
                query[span.start : span.stop], layer_keys, layer_values, span, scaling
            )
        singles = self._singles
        if singles is None:
            return attended
        single_query = query.index_select(0, singles.rows)
        if self.ops.depth_attention is None:
            single_attended = _attend_singles(single_query, layer_keys, layer_values, singles, scaling)
        else:
            by_block = layer_keys.transpose(1, 2), layer_values.transpose(1, 2)
            single_attended = self.ops.depth_attention(single_query, *by_block, self._depth_rows, scaling)
        return attended.index_copy_(0, singles.rows, single_attended)

    @cached_property
    def _depth_rows(self) -> DepthRows:
        """Indices of the single rows, once for all layers."""
        assert self._singles is not None
        indices, rows = self._places, self._singles.rows
        table = to_device(self._table.astype(np.int32), self._device)
        return DepthRows(
            indices.sequences[rows],
            indices.cache_positions[rows],
            indices.loops[rows],
            None,
            None,
            None,
            table,
            self.longest,
        )

    def _grouped(self, sequences: Ints, cache_positions: Ints, loops: Ints) -> tuple[list[_Span], _Singles | None]:
        joined = (
            (sequences[1:] == sequences[:-1])
            & (loops[1:] == loops[:-1])
            & (cache_positions[1:] == cache_positions[:-1] + 1)
        )
        edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(sequences)]
        lengths = np.diff(edges)
        starts = np.array(edges[:-1])
        spans = [
            self._span(
                start, start + count, int(sequences[start]), int(loops[start]), cache_positions[start : start + count]
            )
            for start, count in zip(starts[lengths > 1].tolist(), lengths[lengths > 1].tolist(), strict=True)
        ]
        singles = starts[lengths == 1]
        return spans, self._single(singles, sequences, cache_positions, loops) if len(singles) else None

    def _span(self, start: int, stop: int, sequence: int, plane: int, cache_positions: Ints) -> _Span:
        length = int(cache_positions[-1]) + 1
        blocks = to_device(self._table[sequence, : -(-length // self.planes.shape.size)], self._device)
        mask = np.arange(length) <= cache_positions[:, None]
        return _Span(start, stop, plane, blocks, length, to_device(mask, self._device))

    def _single(self, rows: Ints, sequences: Ints, cache_positions: Ints, loops: Ints) -> _Singles:
        shape, total = self.planes.shape, self.planes.keys[0].shape[2]
        length = int(cache_positions[rows].max()) + 1
        blocks = self._table[sequences[rows], : -(-length // shape.size)]  # [N, P]
        heads = loops[rows][:, None] * shape.kv_heads + np.arange(shape.kv_heads)  # [N, H_kv]
        index = (heads[:, :, None] * total + blocks[:, None]).reshape(-1)
        mask = (np.arange(length) <= cache_positions[rows][:, None])[:, None, None]
        return _Singles(
            to_device(rows, self._device), to_device(index, self._device), length, to_device(mask, self._device)
        )


def _attend_span(query: Tensor, keys: Tensor, values: Tensor, span: _Span, scaling: float) -> Tensor:
    """Rows of one sequence: each K/V head is read once; the query heads that share it are concatenated."""
    count, heads, width = query.shape
    kv_heads = keys.shape[1]
    sequence_kv = [
        part[span.plane].index_select(1, span.blocks).reshape(1, kv_heads, -1, width)[:, :, : span.length]
        for part in (keys, values)
    ]
    grouped = query.view(count, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
    mask = span.mask.repeat(heads // kv_heads, 1)
    attended = F.scaled_dot_product_attention(grouped, sequence_kv[0], sequence_kv[1], attn_mask=mask, scale=scaling)
    return attended.view(kv_heads, heads // kv_heads, count, width).permute(2, 0, 1, 3).reshape(count, heads, width)


def _attend_singles(query: Tensor, keys: Tensor, values: Tensor, singles: _Singles, scaling: float) -> Tensor:
    """Single rows: each over the blocks of its sequence, at its plane."""
    count, heads, width = query.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    sequence_kv = [
        part.view(-1, size, width)
        .index_select(0, singles.index)
        .view(count, kv_heads, -1, width)[:, :, : singles.length]
        for part in (keys, values)
    ]
    grouped = query.view(count, kv_heads, heads // kv_heads, width)
    attended = F.scaled_dot_product_attention(
        grouped, sequence_kv[0], sequence_kv[1], attn_mask=singles.mask, scale=scaling
    )
    return attended.reshape(count, heads, width)
