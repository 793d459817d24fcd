"""Batch rows: tokens between loop 1 and T, tokens that are still pending, and the counts of what was computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigma0.decode.transfer import to_device

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# Role of a row: it only writes its planes; its token has not exited; its token has, and deeper planes are filled.
PREFILL, DECODING, TRAILING = range(3)


@dataclass(frozen=True)
class RowBatch:
    """Tokens of one cache between loop 1 and T, deepest first; indices on the host, states on the device.

    Attributes:
        hidden: State after the last finished loop, `[R, D]`.
        sequences: Batch index, `[R]`.
        cache_positions: Cache position of the token, `[R]`.
        positions: Position for rotary embeddings (pads not counted), `[R]`.
        loops: Loops finished, in [0, T), never rising along the rows, `[R]`.
        state_slots: Slot of the row's exit state, -1 where none is kept, `[R]`.
    """

    hidden: Tensor
    sequences: Ints
    cache_positions: Ints
    positions: Ints
    loops: Ints
    state_slots: Ints

    def __len__(self) -> int:
        return len(self.loops)

    def select(self, rows: Ints) -> "RowBatch":
        """The rows with these indices, in this order."""
        return RowBatch(
            self.hidden.index_select(0, to_device(rows, self.hidden.device)),
            self.sequences[rows],
            self.cache_positions[rows],
            self.positions[rows],
            self.loops[rows],
            self.state_slots[rows],
        )

    def concatenate(self, other: "RowBatch") -> "RowBatch":
        """These rows, then those of `other`."""
        return RowBatch(
            torch.cat([self.hidden, other.hidden]),
            np.concatenate([self.sequences, other.sequences]),
            np.concatenate([self.cache_positions, other.cache_positions]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.loops, other.loops]),
            np.concatenate([self.state_slots, other.state_slots]),
        )

    def deepest_first(self) -> "RowBatch":
        """The same rows in the order that a pass needs."""
        return self.select(np.argsort(-self.loops, kind="stable"))


@dataclass(frozen=True)
class PendingTokens:
    """Tokens with a cache position for which no loop has run.

    Attributes:
        token_ids: Their ids, int64 `[N]`, on the host.
        sequences: Batch index, `[N]`.
        cache_positions: `[N]`.
        positions: Position for rotary embeddings, `[N]`.
    """

    token_ids: Ints
    sequences: Ints
    cache_positions: Ints
    positions: Ints

    def select(self, rows: Ints) -> "PendingTokens":
        """The tokens with these indices."""
        return PendingTokens(
            self.token_ids[rows], self.sequences[rows], self.cache_positions[rows], self.positions[rows]
        )

    def concatenate(self, other: "PendingTokens") -> "PendingTokens":
        """These tokens, then those of `other`."""
        return PendingTokens(
            np.concatenate([self.token_ids, other.token_ids]),
            np.concatenate([self.sequences, other.sequences]),
            np.concatenate([self.cache_positions, other.cache_positions]),
            np.concatenate([self.positions, other.positions]),
        )


@dataclass(frozen=True)
class Rows:
    """Rows of several requests; those of one request at one loop are adjacent, in the order of their positions.

    Attributes:
        hidden: State after the last finished loop, `[R, D]`.
        batch_slots: Batch slot of the request, `[R]`.
        cache_positions: Cache position within the request, `[R]`.
        loops: Loops finished, `[R]`.
        targets: Loop after which the row leaves, `[R]`.
        roles: `PREFILL`, `DECODING` or `TRAILING`, `[R]`.
        state_slots: Slot of its exit state, -1 where none is kept, `[R]`.
    """

    hidden: Tensor
    batch_slots: Ints
    cache_positions: Ints
    loops: Ints
    targets: Ints
    roles: Ints
    state_slots: Ints

    def __len__(self) -> int:
        return len(self.batch_slots)

    def select(self, rows: Ints) -> "Rows":
        """The rows with these indices, in this order."""
        return Rows(
            self.hidden.index_select(0, to_device(rows, self.hidden.device)),
            self.batch_slots[rows],
            self.cache_positions[rows],
            self.loops[rows],
            self.targets[rows],
            self.roles[rows],
            self.state_slots[rows],
        )

    def without(self, gone: Bools) -> "Rows":
        """The rows that are not gone."""
        return self.select(np.flatnonzero(~gone)) if gone.any() else self

    def with_loops(self, hidden: Tensor) -> "Rows":
        """The same rows after one more loop."""
        return replace(self, hidden=hidden, loops=self.loops + 1)


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        torch.cat([part.hidden for part in parts]),
        np.concatenate([part.batch_slots for part in parts]),
        np.concatenate([part.cache_positions for part in parts]),
        np.concatenate([part.loops for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.roles for part in parts]),
        np.concatenate([part.state_slots for part in parts]),
    )


@dataclass
class PassCounts:
    """What was computed, in applications of the shared block to one token.

    Attributes:
        passes: Calls of the block after the prompt.
        rows: Rows in those calls.
        prompt_rows: Rows of prompts, pads left out, and of tokens caught up before a later prompt.
        head_rows: Rows that the output head read after the prompt.
    """

    passes: int = 0
    rows: int = 0
    prompt_rows: int = 0
    head_rows: int = 0
