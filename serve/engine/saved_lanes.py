"""The tokens in flight of a preempted sequence, kept until the K/V of all positions before them are recomputed."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sigma0.decode.lanes import CACHE_POSITION, DEPTH, STAGE, Lanes
from sigma0.decode.transfer import Ints


@dataclass(frozen=True)
class SavedLanes:
    """The lanes of one sequence.

    Attributes:
        table: Their lines, `[T, 6]`.
        hidden: States, `[T, D]`.
        gate: What `qexit` keeps of each, `[T, 2]`.
        watched: Differences, their Gram matrix and counts, each `[T, ...]`; None where they were not kept.
        criteria: What criteria keep of its token that decodes, `[...]` each; empty where they keep nothing.
        probs: Distributions of drafts, `[T, V]`; None where there were none.
        paths: States after every loop of its last positions, `[window, T, D]`; None where they are not kept.
        loops: Loops that the token at each cache position in flight had finished.
        depths: Loop that each was read at; 0 where it was not.
    """

    table: Tensor
    hidden: Tensor
    gate: Tensor
    watched: tuple[Tensor, ...] | None
    criteria: tuple[Tensor, ...]
    probs: Tensor | None
    paths: Tensor | None
    loops: dict[int, int]
    depths: dict[int, int]

    @classmethod
    def of(cls, lanes: Lanes, sequence: int) -> "SavedLanes | None":
        """Copies the lanes of a sequence; None where all are idle."""
        own = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        table = lanes.table[own].clone()
        lines: Ints = table.cpu().numpy()
        live = lines[np.flatnonzero(lines[:, STAGE] < lanes.idle)]
        if not len(live):
            return None
        state = lanes.exit_state if lanes.watched else None
        window = slice(sequence * lanes.window, (sequence + 1) * lanes.window)
        return cls(
            table,
            lanes.hidden[own].clone(),
            lanes.gates()[own].clone(),
            None
            if state is None
            else (state.differences[own].clone(), state.gram[own].clone(), state.counts[own].clone()),
            () if lanes.criteria is None else tuple(part[sequence].clone() for part in lanes.criteria.tensors()),
            None if lanes.probs is None else lanes.probs[own].clone(),
            None if lanes.paths is None else lanes.paths[window].clone(),
            dict(zip(live[:, CACHE_POSITION].tolist(), (live[:, STAGE] % lanes.depth).tolist(), strict=True)),
            dict(zip(live[:, CACHE_POSITION].tolist(), live[:, DEPTH].tolist(), strict=True)),
        )

    def restore(self, lanes: Lanes, sequence: int) -> None:
        """Puts the tokens back in flight, into the lanes of any sequence."""
        own = slice(sequence * lanes.depth, (sequence + 1) * lanes.depth)
        lanes.table[own], lanes.hidden[own], lanes.gate[own] = self.table, self.hidden, self.gate
        state = lanes.exit_state
        if state is not None:
            state.gate[own], state.counts[own] = self.gate, 0
            state.counts[own, 0] = (self.table[:, STAGE] % lanes.depth).int()
            if self.watched is not None:
                state.differences[own], state.gram[own], state.counts[own] = self.watched
        if lanes.criteria is not None:
            for part, saved in zip(lanes.criteria.tensors(), self.criteria, strict=False):
                # room for distributions may have been made since
                part[(sequence, slice(len(saved))) if saved.dim() else sequence] = saved
        if self.probs is not None and lanes.probs is not None:
            lanes.probs[own] = self.probs
        if self.paths is not None and lanes.paths is not None:
            lanes.paths[sequence * lanes.window : (sequence + 1) * lanes.window] = self.paths
