"""What the head says at the deepest loop that a token has run: whether the loops after its exit agree with it.

With h the state after that loop, p = softmax(head(h)) and i the token that was chosen at the exit:

    surprise  - log p_i
    entropy   - sum p log p
    margin    p of the top-1 - p of the top-2
    agrees    1 if i is the argmax of p, else 0

p is the model's own: no temperature, penalty, bias or grammar has touched it. Under `finish` those loops run anyway, so
all this costs is the head, once for each token. The last tokens of an answer have run no further than its end, the very
last no further than its exit. The first one is read from the prompt's last position: at loop T, but for a server's
answer of fewer passes, since the server samples it before that position has run on to T.

A state with a coda cannot be read afterwards, since the coda's K/V of its position are those of the exit; nor can one
whose head is spread over processes, of which only some may ask. There is no reader then, and nothing is known.
"""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sigma0.config import DEEPEST_ROWS
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import certainty, no_broadcast
from sigma0.decode.transfer import Ints, to_device

DEEPEST = ("surprise", "entropy", "margin", "agrees")

Where = TypeVar("Where")
# The numbers named in `DEEPEST`, float32 `[N, 4]`, of states `[N, D]` and ids `[N]`.
DeepestReader = Callable[[Tensor, Tensor], Tensor]


class Deepest(NamedTuple):
    """The numbers named in `DEEPEST` of one token; None where they are not known."""

    surprise: float | None = None
    entropy: float | None = None
    margin: float | None = None
    agrees: bool | None = None

    @classmethod
    def of(cls, row: Sequence[float]) -> "Deepest":
        """Out of a row of numbers, all of them NaN where they are not known."""
        surprise, entropy, margin, agrees = row
        return cls() if entropy != entropy else cls(surprise, entropy, margin, bool(agrees))


def deepest_of(
    logits: Tensor, token_ids: Tensor, certain: Callable[[Tensor], tuple[Tensor, Tensor] | Tensor] = certainty
) -> Tensor:
    """The numbers named in `DEEPEST`, float32 `[N, 4]`; NaN of logits that are not finite.

    Args:
        logits: `[N, V]`.
        token_ids: The token chosen at each exit, int64 `[N]`.
        certain: Entropies and margins `[N]` of logits.
    """
    logits = logits.float()
    surprise = torch.nn.functional.cross_entropy(logits, token_ids, reduction="none")
    entropy, margin = certain(logits)
    numbers = torch.stack([surprise, entropy, margin, (logits.argmax(dim=-1) == token_ids).float()], dim=-1)
    return numbers.masked_fill(~numbers.isfinite().all(dim=-1, keepdim=True), torch.nan)


def deepest_reader(model: LoopedModel) -> DeepestReader | None:
    """Reads states of a model after their last loops; None where that cannot be done afterwards."""
    if model.stages[1] or model.operations.broadcast is not no_broadcast:
        return None
    certain = model.operations.certainty_rows or certainty

    def read(states: Tensor, token_ids: Tensor) -> Tensor:
        return deepest_of(model.read(states), token_ids, certain)

    return read


class DeepestQueue(Generic[Where]):
    """States of tokens that run no further, until the head reads many of them at once.

    Args:
        reader: Of the model.
    """

    def __init__(self, reader: DeepestReader) -> None:
        self._reader = reader
        self.clear()

    def __len__(self) -> int:
        return len(self._where)

    def clear(self) -> None:
        """Forgets all that wait."""
        self._states: list[Tensor] = []
        self._token_ids: list[int] = []
        self._where: list[Where] = []

    def add(self, states: Tensor, token_ids: Sequence[int], where: Sequence[Where]) -> None:
        """Adds tokens.

        Args:
            states: `[N, D]`, which nobody writes to any more.
            token_ids: `[N]`.
            where: What is given back with the numbers of each, `[N]`.
        """
        self._states.append(states)
        self._token_ids += token_ids
        self._where += where

    @torch.no_grad()
    def take(self) -> tuple[list[Where], Tensor]:
        """Reads all that wait, at least one.

        Returns:
            Those that were added, and the numbers named in `DEEPEST` of each, float32 `[N, 4]`.
        """
        states, token_ids, where = self._states, self._token_ids, self._where
        self.clear()
        rows, ids = torch.cat(states), to_device(np.array(token_ids), states[0].device)
        parts = zip(torch.split(rows, DEEPEST_ROWS), torch.split(ids, DEEPEST_ROWS), strict=True)
        return where, torch.cat([self._reader(*part) for part in parts])


class DeepestRecord:
    """What is known of the new tokens of a batch.

    Args:
        reader: Of the model.
        batch: B.
    """

    def __init__(self, reader: DeepestReader, batch: int) -> None:
        # of batch index and output index
        self._queue: DeepestQueue[tuple[int, int]] = DeepestQueue(reader)
        self._ids: list[list[int]] = [[] for _ in range(batch)]
        self._prompt: Tensor | None = None
        self._read: list[tuple[list[tuple[int, int]], Tensor]] = []

    def note_prompt(self, state: Tensor) -> None:
        """Notes the state `[B, D]` of the last prompt position after its last loop."""
        self._prompt = state.detach().clone()

    def note_ids(self, sequences: Ints, token_ids: Ints) -> None:
        """Notes the next token of some sequences, `[N]` each; each is final."""
        for sequence, token_id in zip(sequences.tolist(), token_ids.tolist(), strict=True):
            self._ids[sequence].append(token_id)

    def add(self, states: Tensor, sequences: Ints, indices: Ints) -> None:
        """Takes the states `[N, D]` of noted tokens, by batch index and output index; of each the newest counts."""
        where = list(zip(sequences.tolist(), indices.tolist(), strict=True))
        self._queue.add(states, [self._ids[sequence][index] for sequence, index in where], where)
        if len(self._queue) >= DEEPEST_ROWS:
            self._read.append(self._queue.take())

    def table(self, new: int, device: torch.device) -> Tensor:
        """The numbers named in `DEEPEST` of all tokens that were added, float32 `[B, new, 4]`; NaN elsewhere."""
        if self._prompt is not None and all(self._ids):
            self._queue.add(self._prompt, [ids[0] for ids in self._ids], [(row, 0) for row in range(len(self._ids))])
            self._prompt = None
        if len(self._queue):
            self._read.append(self._queue.take())
        told = torch.full((len(self._ids), new, len(DEEPEST)), torch.nan, device=device)
        for where, numbers in self._read:
            rows, columns = zip(*where, strict=True)
            told[list(rows), list(columns)] = numbers.to(device)
        return told
