"""A model as the decoder sees it: rows at different loops that share one pass of the block."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Frontier
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.ops import BoundaryWeights, DepthRows, Operations, PlaneGroup
from sigma0.decode.transfer import to_device


@dataclass(frozen=True)
class RowPlaces:
    """Where the rows of a pass stand, each int64 `[R]`.

    Attributes:
        sequences: Batch index.
        columns: Column in the planes.
        positions: Position for rotary embeddings.
        loops: Loops finished, which is the plane that is written, counted from 0.
        slots: Slot of the trajectory.
    """

    sequences: Tensor
    columns: Tensor
    positions: Tensor
    loops: Tensor
    slots: Tensor


class PassRows:
    """The rows of one pass: where each writes its K/V and which columns it reads.

    Args:
        cache: The planes.
        frontier: The rows, deepest first, `loops` counting the finished ones.
        ops: What attends.
    """

    def __init__(self, cache: DepthCache, frontier: Frontier, ops: Operations) -> None:
        self.cache = cache
        self.ops = ops
        self.furthest = int(frontier.positions.max())
        self.longest = int(frontier.columns.max()) + 1
        self._frontier = frontier
        self._places: dict[torch.device, RowPlaces] = {}
        self._groups: dict[torch.device, tuple[PlaneGroup, ...]] = {}

    def on(self, device: torch.device) -> "RowPlaces":
        """Where the rows stand, as tensors on a device: one copy for all of them."""
        if device not in self._places:
            rows = self._frontier
            told = np.stack([rows.sequences, rows.columns, rows.positions, rows.loops, rows.slots])
            self._places[device] = RowPlaces(*to_device(told, device).unbind(0))
        return self._places[device]

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
        plane_keys, plane_values = self.cache.reserve_layer(layer, keys.unsqueeze(2), self.longest)
        at = self.on(keys.device)
        plane_keys[at.loops, at.sequences, :, at.columns] = keys
        plane_values[at.loops, at.sequences, :, at.columns] = values
        if self.ops.plane_attention is not None:
            groups = self._grouped(keys.device, plane_keys.shape[1])
            return self.ops.plane_attention(query, plane_keys, plane_values, groups, scaling)
        assert self.ops.depth_attention is not None
        return self.ops.depth_attention(query, plane_keys, plane_values, self._depth_rows(at), scaling)

    def _depth_rows(self, at: "RowPlaces") -> DepthRows:
        cache, device = self.cache, at.loops.device
        starts, seen = cache.padding(self.longest)
        cache.reserve_exits(self.longest)
        exits = cache.exits
        return DepthRows(
            at.sequences,
            at.columns,
            at.loops,
            None if starts is None else starts.to(device),
            None if seen is None else seen.to(device),
            None if exits is None else exits.to(device),
            None,
            self.longest,
        )

    def _grouped(self, device: torch.device, batch: int) -> tuple[PlaneGroup, ...]:
        if device not in self._groups:
            self._groups[device] = self._in_groups(device, batch)
        return self._groups[device]

    def _in_groups(self, device: torch.device, batch: int) -> tuple[PlaneGroup, ...]:
        loops = self._frontier.loops
        if batch == 1 and self.cache.seen(0) is None:
            # One row for each plane, which sees all up to itself.
            rows = zip(loops.tolist(), self._frontier.columns.tolist(), strict=True)
            return tuple(
                PlaneGroup(loop, row, row + 1, None, column + 1, None) for row, (loop, column) in enumerate(rows)
            )
        edges = [0, *(np.flatnonzero(np.diff(loops)) + 1).tolist(), len(loops)]
        return tuple(self._group(start, stop, device, batch) for start, stop in pairwise(edges))

    def _group(self, start: int, stop: int, device: torch.device, batch: int) -> PlaneGroup:
        sequences, columns = self._frontier.sequences[start:stop], self._frontier.columns[start:stop]
        length = int(columns.max()) + 1
        seen = self.cache.seen(length)
        mask = None
        if seen is not None or int(columns.min()) + 1 < length:
            at = self.on(device)
            mask = torch.arange(length, device=device) <= at.columns[start:stop, None]  # [N, length]
            if seen is not None:
                mask &= seen.to(device).index_select(0, at.sequences[start:stop])
            mask = mask[:, None, None, :]
        in_order = len(sequences) == batch and bool((sequences == np.arange(batch)).all())
        index = None if in_order else self.on(device).sequences[start:stop]
        return PlaneGroup(int(self._frontier.loops[start]), start, stop, index, length, mask)


class LoopedModel(Protocol):
    """All that the decoder knows of a model."""

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""

    @property
    def operations(self) -> Operations:
        """What runs a pass: plain torch or kernels."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings h_0 `[R, D]` of ids `[R]`."""

    def block(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """One loop of the shared block over rows `[R, D]`, before the loop's norm."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, D]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def boundary_weights(self) -> BoundaryWeights:
        """Weights of norm and gate, for the kernel that does both."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of normed states `[R, D]`."""
