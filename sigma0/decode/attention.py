"""Attention of the rows of a pass, each over the K/V plane of its own loop up to its own position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sigma0.decode.ops import (
    BlockLayer,
    BlockShape,
    CodedRows,
    DepthRows,
    Operations,
    RowPlaces,
    Span,
    depth_attention_reference,
    span_attention,
    spans_of,
)
from sigma0.decode.planes import CodedLayer, LayerPlanes


@dataclass(frozen=True)
class Placement:
    """Where the cache positions of each sequence lie, and which of them are seen."""

    size: int  # Cache positions of a block
    total: int  # Positions of a plane, nobody's included
    blocks: Tensor | None = None  # Block table, int64 `[S, n]`; None where block s is all of sequence s
    # First flat position of each sequence whose blocks follow each other, -1 of the others, on the host; None
    # where block s is all of sequence s
    first: Sequence[int] | None = None
    # Positions that the blocks of each sequence hold, on the host; None where block s is all of sequence s
    rooms: Sequence[int] | None = None
    # First cache position of each sequence that is no pad, int64 `[S]`; None where there are no pads
    starts: Tensor | None = None
    # Which cache positions are no pads, bool `[S, C]`, where pads lie after a start too; else None
    seen: Tensor | None = None
    # Cache positions of a block of earlier segments, which are in few bits: those `blocks` is then of, and block
    # s as computed is what sequence s has of the segment under way. None where all are as computed
    coded: int | None = None

    @property
    def room(self) -> int:
        """Cache positions of a sequence that there may be."""
        return (self.coded or self.size) * (1 if self.blocks is None else self.blocks.shape[1])

    def flat(self, sequences: Tensor, cache_positions: Tensor) -> Tensor:
        """Flat positions of cache positions, both int64 `[N]`."""
        if self.coded is not None:
            return (cache_positions % self.size).add(sequences, alpha=self.size)
        if self.blocks is None:
            return cache_positions.add(sequences, alpha=self.size)
        blocks = self.blocks[sequences, cache_positions // self.size]
        return blocks * self.size + cache_positions % self.size


@dataclass(frozen=True)
class RowIndices:
    """Indices of the rows of a pass, each int64 `[R]`; the loops that are finished are the plane that is written.

    `positions` are for rotary embeddings.
    """

    sequences: Tensor
    cache_positions: Tensor
    positions: Tensor
    loops: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "RowIndices":
        """The same with a change to each column."""
        return RowIndices(*(change(column) for column in vars(self).values()))

    def select(self, row_ids: Tensor) -> "RowIndices":
        """Some of the rows, int64 `[N]`."""
        return self.each(lambda column: column.index_select(0, row_ids))


class PassRows:
    """The rows of one pass, as the layers of a block see them.

    Args:
        layers: The planes of every layer, with room for all rows.
        placement: Where cache positions lie.
        indices: The rows.
        ops: Operations of the pass; kept as far as the planes allow.
        longest: One more than the largest cache position, or a bound on it; kept.
        live: Which rows are somebody's, bool `[R]`; None where all are.
        written: Plane * positions + position that each row writes, -1 of nobody's, int64 `[R]`, where it is known.
    """

    def __init__(
        self,
        layers: Sequence[LayerPlanes],
        placement: Placement,
        indices: RowIndices,
        ops: Operations,
        longest: int,
        live: Tensor | None = None,
        written: Tensor | None = None,
    ) -> None:
        self.longest = longest
        self._layers = layers
        self._placement = placement
        self.ops = ops = ops if placement.coded is None else ops.over_coded_planes()
        self._live = live
        if ops.depth_attention is not None:
            # once for all layers: the kernels see memory only
            indices = indices.each(lambda column: column.contiguous())
        self._indices, self._by_device = indices, {indices.loops.device: indices}
        self._known_rows: dict[torch.device, DepthRows] = {}
        self._places = None if ops.attend_rows is None else self._placed()
        self._flat = None if self._places is not None or written is not None else self._flat_rows()
        # for the kernel that writes only rows that are somebody's
        self._written = self._flat if written is None else written
        if ops.project_rows is not None and self._flat is not None and live is not None:
            self._written = torch.where(live, self._flat, -1)

    @property
    def by_row(self) -> list[Tensor]:
        """What it holds of each row, each `[R]`."""
        places = self._places
        placed = [] if places is None else [places.sequences, places.cache_positions, places.planes]
        return [*vars(self._indices).values(), *placed]

    @property
    def planes(self) -> list[Tensor]:
        """Keys and values of all layers, whose second size is the number of positions."""
        return [part for layer in self._layers for part in (layer.flat_keys, layer.flat_values)]

    @property
    def is_plain(self) -> bool:
        """Whether it holds no tensors but those of `by_row` and `planes`."""
        place = self._placement
        beside = place.blocks, place.starts, place.seen, place.coded, self._live
        return all(part is None for part in beside)

    @property
    def fixed(self) -> tuple[object, ...]:
        """What a program takes for constant: tables that there are, blocks, and shapes of planes but for positions."""
        place = self._placement
        kinds = (part is not None for part in (place.blocks, place.starts, place.seen))
        shapes = ((part.shape[0], part.shape[2:], part.dtype) for part in self.planes)
        return (*kinds, None if self._places is None else self._places.count, *shapes)

    def positions(self, device: torch.device) -> Tensor:
        """Positions for rotary embeddings, int64 `[R]`, on a device."""
        return self._on(device).positions

    def loops(self, device: torch.device) -> Tensor:
        """Loops finished by each row, int64 `[R]`; of a prelude or a coda the plane that is written."""
        return self._on(device).loops

    def project(self, layer: int, hidden: Tensor, weight: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotated queries `[R, H, d]` of normed rows `[R, D]`, whose K/V it writes, where there is `ops.project_rows`.

        Args:
            layer: Layer index within the block.
            hidden: `[R, D]`.
            weight: Queries, keys and values packed, `[(H + 2 H_kv) d, D]`.
            cos: Of all positions, `[P, d]`.
            signed_sin: Likewise; the first half of each has its sign turned.
        """
        planes, device = self._layers[layer], hidden.device
        assert self.ops.project_rows is not None and self._written is not None
        return self.ops.project_rows(
            hidden, weight, cos, signed_sin, self.positions(device), planes.flat_keys, planes.flat_values,
            self._written.to(device),
        )  # fmt: skip

    def run_block(
        self, layers: Sequence[BlockLayer], shape: BlockShape, hidden: Tensor, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """What all layers make of float32 rows `[R, D]`, whose K/V they write, where there is `ops.run_block`.

        `tables` are cos and signed sin of all positions, `[P, d]` each.
        """
        assert self.ops.run_block is not None and self._places is not None
        planes = [(current.flat_keys, current.flat_values) for current in self._layers[: len(layers)]]
        return self.ops.run_block(layers, shape, planes, hidden, tables, self._indices.positions, self._places)

    def attend(self, layer: int, query: Tensor, keys: Tensor | None, values: Tensor | None, scaling: float) -> Tensor:
        """Writes each row's K/V to the plane of its loop, then attends to that plane up to the row's own position.

        Args:
            layer: Layer index within the block.
            query: `[R, H, d]`, rotated.
            keys: `[R, H_kv, d]`, rotated; None where `project` has written them.
            values: `[R, H_kv, d]`, or None likewise.
            scaling: Factor on the scores.

        Returns:
            `[R, H, d]`.
        """
        planes = self._layers[layer]
        if self.ops.attend_rows is not None and self._places is not None:
            own_keys, own_values = planes.flat_keys, planes.flat_values
            assert keys is not None and values is not None
            return self.ops.attend_rows(own_keys, own_values, query, keys, values, self._places, scaling)
        indices = self._on(query.device)
        if keys is not None and values is not None:
            flat = self._flat
            if flat is None:
                assert self._written is not None
                flat = torch.where(self._written < 0, self._placement.total - 1, self._written)
            planes.write(flat.to(keys.device), keys, values)
        if isinstance(planes, CodedLayer):
            tails = planes.flat_keys, planes.flat_values
            return self.ops.coded_attention(query, tails, planes.coded, self._coded_rows(indices), scaling)
        if self.ops.depth_attention is not None:
            return self.ops.depth_attention(query, planes.keys, planes.values, self._depth_rows(indices), scaling)
        if self._spans is None:
            return depth_attention_reference(query, planes.keys, planes.values, self._depth_rows(indices), scaling)
        return span_attention(query, planes.flat_keys, planes.flat_values, self._spans, scaling)

    def _coded_rows(self, indices: RowIndices) -> CodedRows:
        place, device = self._placement, indices.loops.device
        assert place.coded is not None
        tables = (None if part is None else part.to(device) for part in (place.blocks, place.starts, place.seen))
        sizes = (place.size, place.coded, self.longest)
        return CodedRows(indices.sequences, self._owned().to(device), indices.loops, *sizes, *tables)

    def _owned(self) -> Tensor:
        """Cache positions of the rows, -1 of those that are nobody's, int64 `[R]`."""
        cache_positions = self._indices.cache_positions
        return cache_positions if self._live is None else torch.where(self._live, cache_positions, -1)

    def _placed(self) -> RowPlaces:
        at, place = self._indices, self._placement
        count = (place.total - 1) // place.size
        return RowPlaces(at.sequences, self._owned(), at.loops, count, place.blocks, place.starts, place.seen)

    def _on(self, device: torch.device) -> RowIndices:
        if device not in self._by_device:
            self._by_device[device] = self._indices.each(lambda column: column.to(device))
        return self._by_device[device]

    def _flat_rows(self) -> Tensor:
        """Plane * positions + position that each row writes, int64 `[R]`."""
        at, place = self._indices, self._placement
        position = place.flat(at.sequences, at.cache_positions)
        if self._live is not None:
            position = torch.where(self._live, position, place.total - 1)
        return position.add(at.loops, alpha=place.total)

    def _depth_rows(self, indices: RowIndices) -> DepthRows:
        """The same for every layer."""
        place, device = self._placement, indices.loops.device
        if device not in self._known_rows:
            parts = (place.starts, place.seen, None if place.blocks is None else place.blocks.int())
            starts, seen, blocks = (None if part is None else part.to(device) for part in parts)
            arrived = None
            if self.ops.depth_attention is not None:
                heads = self._layers[0].keys.shape[2]
                arrived = torch.zeros(len(indices.loops) * heads, dtype=torch.int32, device=device)
            current = (indices.sequences, indices.cache_positions, indices.loops)
            self._known_rows[device] = DepthRows(*current, starts, seen, blocks, self.longest, arrived)
        return self._known_rows[device]

    @cached_property
    def _spans(self) -> tuple[Span, ...] | None:
        """The K/V that the rows read, neighbours together; None where cache positions between others are pads."""
        place, at = self._placement, self._indices
        if place.seen is not None:
            return None
        sequences, ends = at.sequences.tolist(), at.cache_positions.tolist()
        starts = None if place.starts is None else place.starts.tolist()
        firsts, rooms, lengths = [], [], []
        for sequence, end in zip(sequences, ends, strict=True):
            base = sequence * place.size if place.first is None else place.first[sequence]
            start = 0 if starts is None else min(starts[sequence], end)
            firsts.append(base + start if base >= 0 else -1 - sequence)
            rooms.append((place.size if place.rooms is None else place.rooms[sequence]) - start)
            lengths.append(end + 1 - start)
        spans = spans_of(at.loops.tolist(), firsts, rooms, lengths)
        return tuple(span if span.first >= 0 else self._scattered(span) for span in spans)

    def _scattered(self, span: Span) -> Span:
        """A span of one sequence whose blocks do not follow each other, with its positions; blocks have no pads."""
        at = self._indices
        seen = torch.arange(span.longest, device=at.loops.device)
        return replace(span, positions=self._placement.flat(at.sequences[span.start].expand_as(seen), seen))
