"""Attention of the rows of one pass over a `DepthCache`, each row over the plane of its own loop."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import RowBatch
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import RowIndices
from sigma0.decode.ops import DepthRows, Operations, PlaneGroup
from sigma0.decode.transfer import to_device


class PassRows:
    """The rows of one pass over a cache: which plane and cache position each writes, and which it reads (`BatchRows`).

    Args:
        cache: The planes.
        in_flight: The rows, deepest first, `loops` counting the finished ones.
        ops: Attention operations.
    """

    def __init__(self, cache: DepthCache, in_flight: RowBatch, ops: Operations) -> None:
        self.cache = cache
        self.ops = ops
        self.furthest = int(in_flight.positions.max())
        self.longest = int(in_flight.cache_positions.max()) + 1
        self._batch = in_flight
        self._indices: dict[torch.device, RowIndices] = {}
        self._groups: dict[torch.device, tuple[PlaneGroup, ...]] = {}

    def on(self, device: torch.device) -> RowIndices:
        """The indices of the rows as tensors on a device, copied once."""
        if device not in self._indices:
            rows = self._batch
            indices = np.stack([rows.sequences, rows.cache_positions, rows.positions, rows.loops, rows.state_slots])
            self._indices[device] = RowIndices(*to_device(indices, device).unbind(0))
        return self._indices[device]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `decode.model.BatchRows.attend`."""
        plane_keys, plane_values = self.cache.reserve_layer(layer, keys.unsqueeze(2), self.longest)
        at = self.on(keys.device)
        plane_keys[at.loops, at.sequences, :, at.cache_positions] = keys
        plane_values[at.loops, at.sequences, :, at.cache_positions] = values
        if self.ops.plane_attention is not None:
            groups = self._grouped(keys.device, plane_keys.shape[1])
            return self.ops.plane_attention(query, plane_keys, plane_values, groups, scaling)
        assert self.ops.depth_attention is not None
        return self.ops.depth_attention(query, plane_keys, plane_values, self._depth_rows(at), scaling)

    def _depth_rows(self, at: RowIndices) -> DepthRows:
        cache, device = self.cache, at.loops.device
        starts, seen = cache.padding(self.longest)
        cache.reserve_exits(self.longest)
        exits = cache.exits
        return DepthRows(
            at.sequences,
            at.cache_positions,
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
        loops = self._batch.loops
        if batch == 1 and self.cache.seen(0) is None:
            # One row for each plane, which sees all up to itself.
            rows = zip(loops.tolist(), self._batch.cache_positions.tolist(), strict=True)
            return tuple(
                PlaneGroup(loop, row, row + 1, None, cache_position + 1, None)
                for row, (loop, cache_position) in enumerate(rows)
            )
        edges = [0, *(np.flatnonzero(np.diff(loops)) + 1).tolist(), len(loops)]
        return tuple(self._group(start, stop, device, batch) for start, stop in pairwise(edges))

    def _group(self, start: int, stop: int, device: torch.device, batch: int) -> PlaneGroup:
        sequences, cache_positions = self._batch.sequences[start:stop], self._batch.cache_positions[start:stop]
        length = int(cache_positions.max()) + 1
        seen = self.cache.seen(length)
        mask = None
        if seen is not None or int(cache_positions.min()) + 1 < length:
            at = self.on(device)
            mask = torch.arange(length, device=device) <= at.cache_positions[start:stop, None]  # [N, length]
            if seen is not None:
                mask &= seen.to(device).index_select(0, at.sequences[start:stop])
            mask = mask[:, None, None, :]
        in_order = len(sequences) == batch and bool((sequences == np.arange(batch)).all())
        index = None if in_order else self.on(device).sequences[start:stop]
        return PlaneGroup(int(self._batch.loops[start]), start, stop, index, length, mask)
