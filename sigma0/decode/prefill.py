"""Prefill beside the lanes: positions of prompts, and positions that are recomputed, run in the passes of others.

A chunk enters at loop 1 and runs a loop in every pass, one chunk of a sequence at least as deep as the one behind it.
No decision is taken about its rows: each leaves after a loop that is known beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.batch import Ints
from sigma0.decode.model import BatchRows, LoopedModel
from sigma0.decode.ops import Operations
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.transfer import to_device


@dataclass(frozen=True)
class Chunk:
    """Positions of one sequence at the same loop.

    Attributes:
        sequence: Which.
        positions: Cache positions, which are positions for rotary embeddings too, ascending, `[N]`.
        targets: Loop after which each leaves, `[N]`.
        loops: Loops finished.
        hidden: States after them, `[N, D]`.
    """

    sequence: int
    positions: Ints
    targets: Ints
    loops: int
    hidden: Tensor

    def select(self, rows: Ints) -> "Chunk":
        """Some of its rows."""
        hidden = self.hidden.index_select(0, to_device(rows, self.hidden.device))
        return replace(self, positions=self.positions[rows], targets=self.targets[rows], hidden=hidden)


@dataclass(frozen=True)
class PassPlace:
    """Where the rows of a pass read and write.

    Attributes:
        layers: Planes of every layer.
        placement: Where cache positions lie.
        ops: Attention operations.
        longest: One more than the largest cache position, or a bound on it.
    """

    layers: Sequence[LayerPlanes]
    placement: Placement
    ops: Operations
    longest: int


class Prefill:
    """Chunks under way.

    Attributes:
        chunks: In the order in which they entered.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk.positions) for chunk in self.chunks)

    def enter(self, sequence: int, positions: Ints, targets: Ints, hidden: Tensor) -> None:
        """Puts a chunk before loop 1; rows whose target is 0 do not run.

        Args:
            sequence: Which.
            positions: Ascending cache positions, `[N]`.
            targets: Loop after which each leaves, `[N]`.
            hidden: What loop 1 starts from, `[N, D]`.
        """
        chunk = Chunk(sequence, positions, targets, 0, hidden)
        kept = np.flatnonzero(targets > 0)
        if len(kept) < len(positions):
            chunk = chunk.select(kept)
        if len(chunk.positions):
            self.chunks.append(chunk)

    def has(self, sequence: int) -> bool:
        """Whether positions of a sequence are under way."""
        return any(chunk.sequence == sequence for chunk in self.chunks)

    def remove(self, sequence: int) -> None:
        """Drops the chunks of a sequence."""
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence != sequence]

    def loop(self, model: LoopedModel, place: PassPlace, lanes: RowIndices, hidden: Tensor) -> Tensor:
        """One loop of all chunks and of the lanes, side by side.

        Args:
            model: The looped model.
            place: Where they read and write.
            lanes: Rows of lanes, `[R]`; R may be 0.
            hidden: Their states, `[R, D]`.

        Returns:
            The lanes' states before the loop's norm, `[R, D]`.
        """
        rows = _indices(self.chunks, hidden.device)
        view: BatchRows
        if place.ops.depth_attention is not None:
            pairs = zip(vars(lanes).values(), vars(rows).values(), strict=True)
            together = RowIndices(*(torch.cat(pair) for pair in pairs))
            view = PassRows(place.layers, place.placement, together, place.ops, place.longest)
        else:
            view = _ChunkedRows(place, lanes, rows, self.chunks)
        raw = model.loop(torch.cat([hidden, *(chunk.hidden for chunk in self.chunks)]), view)
        normed = model.norm(raw[len(hidden) :])
        parts = torch.split(normed, [len(chunk.positions) for chunk in self.chunks])
        self.chunks = [
            replace(chunk, hidden=part, loops=chunk.loops + 1) for chunk, part in zip(self.chunks, parts, strict=True)
        ]
        return raw[: len(hidden)]

    def leave(self) -> list[Chunk]:
        """Takes out the rows that have reached their targets."""
        gone, kept = [], []
        for chunk in self.chunks:
            arrived = chunk.targets <= chunk.loops
            if arrived.all():
                gone.append(chunk)
            elif arrived.any():
                gone.append(chunk.select(np.flatnonzero(arrived)))
                kept.append(chunk.select(np.flatnonzero(~arrived)))
            else:
                kept.append(chunk)
        self.chunks = kept
        return gone


def _indices(chunks: Sequence[Chunk], device: torch.device) -> RowIndices:
    counts = [len(chunk.positions) for chunk in chunks]
    sequences = np.repeat([chunk.sequence for chunk in chunks], counts)
    positions = np.concatenate([chunk.positions for chunk in chunks])
    planes = np.repeat([chunk.loops for chunk in chunks], counts)
    both = to_device(np.stack([sequences, positions, planes]).astype(np.int64), device)
    return RowIndices(both[0], both[1], both[1], both[2])


class _ChunkedRows:
    """Rows of lanes, then those of chunks, each chunk attending at once: `sigma0.decode.model.BatchRows`.

    Args:
        place: Where they read and write.
        lanes: Rows of lanes, `[R]`.
        rows: Rows of all chunks, `[N]`.
        chunks: In the order of the rows.
    """

    def __init__(self, place: PassPlace, lanes: RowIndices, rows: RowIndices, chunks: Sequence[Chunk]) -> None:
        self.longest = place.longest
        self._place = place
        self._count = len(lanes.loops)
        self._lanes = PassRows(place.layers, place.placement, lanes, place.ops, place.longest) if self._count else None
        self._positions = torch.cat([lanes.positions, rows.positions])
        flat = place.placement.flat(rows.sequences, rows.cache_positions)
        self._flat = flat.add(rows.loops, alpha=place.placement.total)
        self._chunks = chunks
        device = self._flat.device
        self._masks = [
            to_device(np.arange(int(chunk.positions[-1]) + 1) <= chunk.positions[:, None], device) for chunk in chunks
        ]

    def positions(self, device: torch.device) -> Tensor:
        """Positions for rotary embeddings, int64 `[R + N]`."""
        return self._positions.to(device)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `decode.model.BatchRows.attend`."""
        planes, count = self._place.layers[layer], self._count
        # a lane of the last prompt token sees the chunk before it
        planes.write(self._flat, keys[count:], values[count:])
        parts = []
        if self._lanes is not None:
            parts.append(self._lanes.attend(layer, query[:count], keys[:count], values[:count], scaling))
        start = count
        for chunk, mask in zip(self._chunks, self._masks, strict=True):
            stop = start + len(chunk.positions)
            parts.append(_attend_chunk(query[start:stop], planes, self._place.placement, chunk, mask, scaling))
            start = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_chunk(
    query: Tensor, planes: LayerPlanes, placement: Placement, chunk: Chunk, mask: Tensor, scaling: float
) -> Tensor:
    """Positions of one sequence: each K/V head is read once; the query heads that share it are concatenated."""
    count, heads, width = query.shape
    length, kv_heads = mask.shape[1], planes.flat_keys.shape[2]
    seen = [_sequence_kv(flat[chunk.loops], placement, chunk.sequence, length) for flat in _tensors(planes)]
    grouped = query.view(count, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, width)
    if heads > kv_heads:
        mask = mask.repeat(heads // kv_heads, 1)
    attended = F.scaled_dot_product_attention(grouped, seen[0], seen[1], attn_mask=mask, scale=scaling)
    attended = attended.view(kv_heads, heads // kv_heads, count, width).permute(2, 0, 1, 3)
    return attended.reshape(count, heads, width).contiguous()


def _tensors(planes: LayerPlanes) -> tuple[Tensor, Tensor]:
    return planes.flat_keys, planes.flat_values


def _sequence_kv(flat: Tensor, placement: Placement, sequence: int, length: int) -> Tensor:
    """The first positions of a sequence in a plane `[positions, H_kv, d]`, as `[1, H_kv, length, d]`."""
    first = -1 if placement.first is None else placement.first[sequence]
    if first >= 0:
        part = flat[first : first + length]
    else:
        assert placement.blocks is not None
        blocks = placement.blocks[sequence, : -(-length // placement.size)]
        by_block = flat[:-1].view(-1, placement.size, *flat.shape[1:])
        part = by_block.index_select(0, blocks).flatten(0, 1)[:length]
    return part.transpose(0, 1)[None]
