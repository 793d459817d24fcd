"""Tokens that are still pending, and the counts of what was computed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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


@dataclass
class PassCounts:
    """What was computed, in applications of the shared block to one token.

    Attributes:
        passes: Calls of the block after the prompt.
        rows: Rows in those calls.
        prompt_rows: Rows of prompts, pads left out, and of tokens caught up before a later prompt.
        head_rows: Rows that the output head read after the prompt.
        prompt_chunks: Chunks of prompts in an engine's passes.
    """

    passes: int = 0
    rows: int = 0
    prompt_rows: int = 0
    head_rows: int = 0
    prompt_chunks: int = 0
