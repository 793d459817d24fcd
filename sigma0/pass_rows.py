"""A model as the decoder sees it: rows at different loops that share one pass of the block."""

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sigma0.cache import DepthCache
from sigma0.frontier import Frontier
from sigma0.ops import PlaneGroup, plane_attention


class PassRows:
    """The rows of one pass: where each writes its K/V and which columns it reads.

    Args:
        cache: The planes.
        frontier: The rows, deepest first, `loops` counting the finished ones.
    """

    def __init__(self, cache: DepthCache, frontier: Frontier) -> None:
        self.cache = cache
        self.positions = torch.from_numpy(frontier.positions)  # [R]
        self.furthest = int(frontier.positions.max())
        self.columns = int(frontier.columns.max()) + 1
        self._loops = torch.from_numpy(frontier.loops)
        self._sequences = torch.from_numpy(frontier.sequences)
        self._columns = torch.from_numpy(frontier.columns)
        self._frontier = frontier
        self._by_device: dict[torch.device, tuple[Tensor, Tensor, Tensor, tuple[PlaneGroup, ...]]] = {}

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
        plane_keys, plane_values = self.cache.reserve_layer(layer, keys.unsqueeze(2), self.columns)
        loops, sequences, columns, groups = self._on(keys.device, plane_keys.shape[1])
        plane_keys[loops, sequences, :, columns] = keys
        plane_values[loops, sequences, :, columns] = values
        return plane_attention(query, plane_keys, plane_values, groups, scaling)

    def _on(self, device: torch.device, batch: int) -> tuple[Tensor, Tensor, Tensor, tuple[PlaneGroup, ...]]:
        if device not in self._by_device:
            self._by_device[device] = (
                self._loops.to(device),
                self._sequences.to(device),
                self._columns.to(device),
                self._groups(device, batch),
            )
        return self._by_device[device]

    def _groups(self, device: torch.device, batch: int) -> tuple[PlaneGroup, ...]:
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
            row_columns = self._columns[start:stop].to(device)
            mask = torch.arange(length, device=device) <= row_columns[:, None]  # [N, length]
            if seen is not None:
                mask &= seen.to(device).index_select(0, self._sequences[start:stop].to(device))
            mask = mask[:, None, None, :]
        in_order = len(sequences) == batch and bool((sequences == np.arange(batch)).all())
        index = None if in_order else self._sequences[start:stop].to(device)
        return PlaneGroup(int(self._frontier.loops[start]), start, stop, index, length, mask)


class LoopedModel(Protocol):
    """All that the decoder knows of a model."""

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings h_0 `[R, D]` of ids `[R]`."""

    def block(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """One loop of the shared block over rows `[R, D]`, before the loop's norm."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The loop's norm, `[R, D]`."""

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of normed states `[R, D]`."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of normed states `[R, D]`."""
