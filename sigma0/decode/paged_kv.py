"""K/V in pages: storage by layer and plane, and the attention of a pass's rows over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.decode.attention import RowPlaces
from sigma0.decode.batch import Ints
from sigma0.decode.ops import DepthRows, Operations
from sigma0.decode.transfer import to_device


@dataclass(frozen=True)
class PageShape:
    """What a page of a model takes.

    Attributes:
        layers: L.
        planes: T.
        kv_heads: H_kv.
        head_dim: d.
        size: Columns.
    """

    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    size: int

    @classmethod
    def of(cls, model: Any, size: int) -> "PageShape":
        """Of a model's configuration."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(model.num_block_layers, model.num_loops, config.num_key_value_heads, head_dim, size)

    def bytes_with(self, dtype: torch.dtype) -> int:
        """Bytes of a page's keys and values over all layers and planes."""
        return 2 * self.layers * self.planes * self.kv_heads * self.head_dim * self.size * dtype.itemsize

    def count_in(self, kv_bytes: int, dtype: torch.dtype) -> int:
        """Pages that so many bytes hold.

        Raises:
            ValueError: If that is none.
        """
        each = self.bytes_with(dtype)
        if kv_bytes < each:
            raise ValueError(f"{kv_bytes} bytes of K/V hold no page: one takes {each} bytes")
        return kv_bytes // each


class PagedPlanes:
    """Keys and values of every layer, `[T, H_kv, pages, size, d]`.

    Args:
        shape: Of a page.
        pages: How many.
        dtype: Of the K/V.
        device: Where they are.
    """

    def __init__(self, shape: PageShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        room = (shape.planes, shape.kv_heads, pages, shape.size, shape.head_dim)
        with torch.inference_mode(False):
            self.keys = [torch.zeros(room, dtype=dtype, device=device) for _ in range(shape.layers)]
            self.values = [torch.zeros(room, dtype=dtype, device=device) for _ in range(shape.layers)]

    def wipe(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros."""
        index = to_device(np.array(pages, dtype=np.int64), self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(2, index, 0)

    def copy_down(self, pages: Tensor, places: Tensor, planes: Tensor) -> None:
        """Copies the K/V of some columns from one plane to all behind it: their deeper loops are never run.

        Args:
            pages: Page of each column, int64 `[N]`.
            places: Its place in the page, `[N]`.
            planes: The last plane that was written, counted from 0, `[N]`.
        """
        targets = torch.arange(1, self.shape.planes, device=planes.device)[:, None]  # [T - 1, 1]
        sources = torch.minimum(targets, planes)  # a plane up to the last is copied to itself
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, pages, places] = tensor[sources, :, pages, places]


@dataclass(frozen=True)
class _Span:
    """Rows of one text at one plane, side by side: a stretch of a prompt.

    Attributes:
        start: First row.
        stop: One past the last.
        plane: Counted from 0.
        pages: Of the text, int64 `[P]`.
        length: Columns that the last row sees.
        mask: Which of them each row sees, bool `[rows, length]`.
    """

    start: int
    stop: int
    plane: int
    pages: Tensor
    length: int
    mask: Tensor


@dataclass(frozen=True)
class _Singles:
    """Rows that stand alone at their planes.

    Attributes:
        rows: Their numbers, int64 `[N]`.
        index: Of what each sees, among all (plane, head, page), padded with its own first page, int64 `[N * H_kv * P]`.
        length: Columns that the furthest sees.
        mask: Which of them each row sees, bool `[N, 1, 1, length]`.
    """

    rows: Tensor
    index: Tensor
    length: int
    mask: Tensor


class PagedRows:
    """The rows of one pass over pages: what a model's block asks of them, as `sigma0.decode.attention.PassRows`.

    Rows of one text at one plane stand side by side in the order of their columns.

    Args:
        planes: Storage.
        ops: What attends.
        texts: Which text each row is of, an index into `tables`, `[R]`.
        tables: Pages of each text.
        columns: Column of each row, which is its position too, `[R]`.
        loops: Loops that each has finished: the plane that it writes, `[R]`.
        slots: Slot of each row's trajectory, `[R]`.
    """

    def __init__(
        self,
        planes: PagedPlanes,
        ops: Operations,
        texts: Ints,
        tables: Sequence[Sequence[int]],
        columns: Ints,
        loops: Ints,
        slots: Ints,
    ) -> None:
        self.planes = planes
        self.ops = ops
        self.furthest = int(columns.max())
        self.longest = self.furthest + 1
        size = planes.shape.size
        self._told = np.stack([texts, columns, columns, loops, slots])
        self._table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, pages in zip(self._table, tables, strict=True):
            row[: len(pages)] = pages
            # a masked place may hold no number, and then only the text that wrote it may be harmed
            row[len(pages) :] = pages[0] if pages else 0
        self._at = np.stack([self._table[texts, columns // size], columns % size])
        self._device = planes.keys[0].device
        self._places = RowPlaces(*to_device(self._told, self._device).unbind(0))
        self._pages, self._columns = to_device(self._at, self._device).unbind(0)
        self._spans, self._alone = self._grouped(texts, columns, loops)

    def on(self, device: torch.device) -> RowPlaces:
        """Where the rows stand, as tensors on a device."""
        assert device == self._device, f"rows on {device} over pages on {self._device}"
        return self._places

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Writes each row's K/V to the plane of its loop, then attends to that plane up to the row's own column.

        Args:
            layer: Layer index within the block.
            query: `[R, H, d]`, rotated.
            keys: `[R, H_kv, d]`, rotated.
            values: `[R, H_kv, d]`.
            scaling: Factor on the scores.

        Returns:
            `[R, H, d]`.
        """
        own_keys, own_values = self.planes.keys[layer], self.planes.values[layer]
        loops = self._places.loops
        own_keys[loops, :, self._pages, self._columns] = keys
        own_values[loops, :, self._pages, self._columns] = values
        attended = torch.empty_like(query)
        for span in self._spans:
            attended[span.start : span.stop] = _attend_span(
                query[span.start : span.stop], own_keys, own_values, span, scaling
            )
        alone = self._alone
        if alone is None:
            return attended
        own_query = query.index_select(0, alone.rows)
        if self.ops.depth_attention is None:
            found = _attend_singles(own_query, own_keys, own_values, alone, scaling)
        else:
            by_page = own_keys.transpose(1, 2), own_values.transpose(1, 2)
            found = self.ops.depth_attention(own_query, *by_page, self._depth_rows, scaling)
        return attended.index_copy_(0, alone.rows, found)

    @cached_property
    def _depth_rows(self) -> DepthRows:
        """Where the rows stand that stand alone, once for all layers."""
        assert self._alone is not None
        places, rows = self._places, self._alone.rows
        table = to_device(self._table.astype(np.int32), self._device)
        return DepthRows(
            places.sequences[rows], places.columns[rows], places.loops[rows], None, None, None, table, self.longest
        )

    def _grouped(self, texts: Ints, columns: Ints, loops: Ints) -> tuple[list[_Span], _Singles | None]:
        joined = (texts[1:] == texts[:-1]) & (loops[1:] == loops[:-1]) & (columns[1:] == columns[:-1] + 1)
        edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(texts)]
        lengths = np.diff(edges)
        starts = np.array(edges[:-1])
        spans = [
            self._span(start, start + count, int(texts[start]), int(loops[start]), columns[start : start + count])
            for start, count in zip(starts[lengths > 1].tolist(), lengths[lengths > 1].tolist(), strict=True)
        ]
        alone = starts[lengths == 1]
        return spans, self._single(alone, texts, columns, loops) if len(alone) else None

    def _span(self, start: int, stop: int, text: int, plane: int, columns: Ints) -> _Span:
        length = int(columns[-1]) + 1
        pages = to_device(self._table[text, : -(-length // self.planes.shape.size)], self._device)
        mask = np.arange(length) <= columns[:, None]
        return _Span(start, stop, plane, pages, length, to_device(mask, self._device))

    def _single(self, rows: Ints, texts: Ints, columns: Ints, loops: Ints) -> _Singles:
        shape, total = self.planes.shape, self.planes.keys[0].shape[2]
        length = int(columns[rows].max()) + 1
        pages = self._table[texts[rows], : -(-length // shape.size)]  # [N, P]
        heads = loops[rows][:, None] * shape.kv_heads + np.arange(shape.kv_heads)  # [N, H_kv]
        index = (heads[:, :, None] * total + pages[:, None]).reshape(-1)
        mask = (np.arange(length) <= columns[rows][:, None])[:, None, None]
        return _Singles(
            to_device(rows, self._device), to_device(index, self._device), length, to_device(mask, self._device)
        )


def _attend_span(query: Tensor, keys: Tensor, values: Tensor, span: _Span, scaling: float) -> Tensor:
    """Rows of one text: each head once over its keys; query heads that share them stand one behind the other."""
    count, heads, width = query.shape
    kv_heads = keys.shape[1]
    own = [
        part[span.plane].index_select(1, span.pages).reshape(1, kv_heads, -1, width)[:, :, : span.length]
        for part in (keys, values)
    ]
    grouped = query.view(count, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
    mask = span.mask.repeat(heads // kv_heads, 1)
    found = F.scaled_dot_product_attention(grouped, own[0], own[1], attn_mask=mask, scale=scaling)
    return found.view(kv_heads, heads // kv_heads, count, width).permute(2, 0, 1, 3).reshape(count, heads, width)


def _attend_singles(query: Tensor, keys: Tensor, values: Tensor, alone: _Singles, scaling: float) -> Tensor:
    """Rows that stand alone: each over the pages of its own text, at its own plane."""
    count, heads, width = query.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    own = [
        part.view(-1, size, width).index_select(0, alone.index).view(count, kv_heads, -1, width)[:, :, : alone.length]
        for part in (keys, values)
    ]
    grouped = query.view(count, kv_heads, heads // kv_heads, width)
    found = F.scaled_dot_product_attention(grouped, own[0], own[1], attn_mask=alone.mask, scale=scaling)
    return found.reshape(count, heads, width)
