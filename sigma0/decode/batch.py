"""Tokens of a cache that are not at full depth, and the counts of what was computed for them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigma0.decode.transfer import to_device

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Frontier:
    """Tokens between loop 1 and T, deepest first; bookkeeping on the host, states on the device.

    Attributes:
        hidden: State after the last finished loop, `[R, D]`.
        sequences: Batch index, `[R]`.
        columns: Column of the token in the planes, `[R]`.
        positions: Position for rotary embeddings (pads not counted), `[R]`.
        loops: Loops finished, in [0, T), never rising along the rows, `[R]`.
        slots: Where the trajectory of each row is kept, -1 where it is not, `[R]`.
    """

    hidden: Tensor
    sequences: Ints
    columns: Ints
    positions: Ints
    loops: Ints
    slots: Ints

    def __len__(self) -> int:
        return len(self.loops)

    def select(self, rows: Ints) -> "Frontier":
        """The rows with these indices, in this order."""
        return Frontier(
            self.hidden.index_select(0, to_device(rows, self.hidden.device)),
            self.sequences[rows],
            self.columns[rows],
            self.positions[rows],
            self.loops[rows],
            self.slots[rows],
        )

    def concatenate(self, other: "Frontier") -> "Frontier":
        """These rows, then those of `other`."""
        return Frontier(
            torch.cat([self.hidden, other.hidden]),
            np.concatenate([self.sequences, other.sequences]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.loops, other.loops]),
            np.concatenate([self.slots, other.slots]),
        )

    def deepest_first(self) -> "Frontier":
        """The same rows in the order that a pass needs."""
        return self.select(np.argsort(-self.loops, kind="stable"))


@dataclass(frozen=True)
class SkippedTokens:
    """Tokens with a column that no loop was run for.

    Attributes:
        token_ids: Their ids, int64 `[N]`, on the host.
        sequences: Batch index, `[N]`.
        columns: Column in the planes, `[N]`.
        positions: Position for rotary embeddings, `[N]`.
    """

    token_ids: Ints
    sequences: Ints
    columns: Ints
    positions: Ints

    def select(self, rows: Ints) -> "SkippedTokens":
        """The tokens with these indices."""
        return SkippedTokens(self.token_ids[rows], self.sequences[rows], self.columns[rows], self.positions[rows])

    def concatenate(self, other: "SkippedTokens") -> "SkippedTokens":
        """These tokens, then those of `other`."""
        return SkippedTokens(
            np.concatenate([self.token_ids, other.token_ids]),
            np.concatenate([self.sequences, other.sequences]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.positions, other.positions]),
        )


@dataclass
class PassCounts:
    """What was computed, in applications of the shared block to one token.

    Attributes:
        passes: Calls of the block after the prompt.
        rows: Rows in those calls.
        prompt_rows: Rows of prompts, pads left out, and of tokens completed ahead of a later prompt.
        head_rows: Rows that the output head read after the prompt.
    """

    passes: int = 0
    rows: int = 0
    prompt_rows: int = 0
    head_rows: int = 0
