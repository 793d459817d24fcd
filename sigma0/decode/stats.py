"""Statistics of new tokens: of every loop, and of the logits and ids.

No token depends on them, so a pass only notes its states, or the statistics if a kernel or the exit rule has computed
them, and the logits of its tokens. They are computed at once, on access or when enough has accumulated; the memory
until then is bounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Ints
from sigma0.decode.ops import (
    LOGIT_STATS,
    STATISTICS,
    Collapse,
    CollapseRule,
    CollapseState,
    ExitParams,
    LoopEndOutput,
    certainty,
    observe_paths,
)
from sigma0.decode.repetition import EntropyDrop, Repeated, Repetition
from sigma0.decode.transfer import to_device

# Rows of states and rows of logits that are kept before they are worked out; more in a batch, for which it holds at
# least as many passes.
_STATES, _LOGITS, _PASSES = 512, 64, 4
# A token that has not entered, or was dropped.
_CLOSED = -1


@dataclass(frozen=True)
class PathReader:
    """Computes the statistics of loop states.

    Attributes:
        gate: Gate logits `[N]` of normed states `[N, D]`.
        rule: Limits of the fates.
    """

    gate: Callable[[Tensor], Tensor]
    rule: ExitParams

    @torch.no_grad()
    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics float32 `[N, T, 8]` and fates `[N, T]` of states `[N, T, D]`."""
        gates = self.gate(states.flatten(0, 1)).view(states.shape[:2])
        return observe_paths(states, gates, self.rule)


class RunRecord:
    """Statistics of new tokens; token i of a sequence is sampled from the position before it.

    Args:
        batch: B.
        new: Capacity in new tokens; grows as needed.
        total_loops: T.
        device: Of the results.

    Attributes:
        first_position: Cache position that the first new token is sampled from.
        pending_logits: Logits `[B, V]` of tokens that transformers' own loop is about to sample; None elsewhere.
    """

    def __init__(self, batch: int, new: int, total_loops: int, device: torch.device) -> None:
        self.first_position = 0
        self.pending_logits: Tensor | None = None
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self._loops, self._fates, self._logit_stats = _blank(batch, new, total_loops, device)
        # for each token, the first pass whose notes count
        self._opened: Ints = np.full((batch, new), _CLOSED, dtype=np.int64)
        self._number = 0
        # notes: number of the pass; sequences, cache positions and loops of its rows; their statistics or states
        self._noted: list[tuple[int, Ints, Ints, Ints, tuple[Tensor, Tensor] | Tensor]] = []
        # states of tokens whose loops are not over, as they were noted, with a number for each row
        self._unfinished: tuple[Ints, Ints, Ints, Ints, Tensor] | None = None
        # number of the pass from which notes of these positions count, or the first token that is dropped
        self._opens: list[tuple[int, Any, Any]] = []
        self._rows, self._most_rows = 0, max(_STATES, _PASSES * batch * total_loops)
        self._reader: PathReader | None = None
        self._noted_logits: list[tuple[Tensor, Ints, Ints, Sequence[Repetition]]] = []
        self._logit_rows = 0
        self._drops = [EntropyDrop() for _ in range(batch)]

    @classmethod
    def empty(cls, batch: int, new: int, total_loops: int, device: torch.device) -> "RunRecord":
        """Without any token; grows beyond `new` tokens as needed."""
        return cls(batch, new, total_loops, device)

    @cached_property
    def collapse(self) -> CollapseState:
        """What a kernel that computes the statistics of logits keeps between tokens."""
        with torch.inference_mode(False):
            return CollapseState.empty(len(self._drops), self.device)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self._loops.device

    @property
    def loops(self) -> Tensor:
        """change, bend, gain, turning, radius, angle, residual and hazard after each loop, float32 `[B, new, T, 8]`.

        NaN where no loop was run.
        """
        self._flush_loops()
        return self._loops

    @property
    def fates(self) -> Tensor:
        """Index into `sigma0.decode.ops.FATES`, int8 `[B, new, T]`; 0 where there is none."""
        self._flush_loops()
        return self._fates

    @property
    def logit_stats(self) -> Tensor:
        """entropy, margin, drop, periodicity, lag, echo, distinct and proximity, float32 `[B, new, 8]`.

        NaN where there is no token.
        """
        self._flush_logits()
        return self._logit_stats

    def put_prompt(self, statistics: Tensor, fates: Tensor, cache_position: int) -> None:
        """Records the loops of the last prompt position.

        Args:
            statistics: `[T', B, 8]`.
            fates: `[T', B]`.
            cache_position: Its cache position.
        """
        self._begin(cache_position)
        self._loops[:, 0, : len(statistics)] = statistics.transpose(0, 1)
        self._fates[:, 0, : len(fates)] = fates.transpose(0, 1).to(torch.int8)

    def note_prompt(self, states: Tensor, cache_position: int, reader: PathReader) -> None:
        """Notes the states `[T', B, D]` of the last prompt position."""
        self._begin(cache_position)
        loops, batch, _ = states.shape
        self._opened[:, 0], self._reader = self._number, reader
        cache_positions, sequences = np.full(loops * batch, cache_position), np.tile(np.arange(batch), loops)
        self._note(states.detach().flatten(0, 1), sequences, cache_positions, np.repeat(np.arange(loops), batch))

    def _begin(self, cache_position: int) -> None:
        self._flush_loops()
        self.first_position = cache_position
        # rows of earlier tokens are run to full depth before another prefill
        self._noted, self._rows, self._unfinished = [], 0, None

    def open(self, sequences: Ints, cache_positions: Ints) -> None:
        """Discards the notes of positions that are run again.

        Args:
            sequences: Batch index, int64 `[N]`.
            cache_positions: `[N]`.
        """
        self._opens.append((self._number, sequences, cache_positions))

    def forget(self, sequence: int, first: int) -> None:
        """Discards the notes of a sequence's tokens from index `first` on, which were dropped."""
        self._opens.append((_CLOSED, sequence, first))

    def put(self, loop_end: LoopEndOutput, sequences: Ints, cache_positions: Ints, loops: Ints) -> None:
        """Notes one loop of some rows, with statistics.

        Args:
            loop_end: Result of the loop end.
            sequences: Batch index of each, int64 `[R]`.
            cache_positions: `[R]`.
            loops: The finished loop, counted from 0, `[R]`.
        """
        self._note((loop_end.statistics, loop_end.fates), sequences, cache_positions, loops)

    def note(self, states: Tensor, sequences: Ints, cache_positions: Ints, loops: Ints, reader: PathReader) -> None:
        """Notes one loop of some rows by their states `[R, D]`, for the reader."""
        self._reader = reader
        self._note(states, sequences, cache_positions, loops)

    def _note(
        self, noted_values: tuple[Tensor, Tensor] | Tensor, sequences: Ints, cache_positions: Ints, loops: Ints
    ) -> None:
        self._noted.append((self._number, sequences, cache_positions, loops, noted_values))
        self._number += 1
        self._rows += len(sequences)
        if self._rows >= self._most_rows:
            self._flush_loops()

    def put_logit_stats(self, collapse: Collapse, sequences: Tensor, indices: Tensor, last: int) -> None:
        """Records the statistics of the logits of some tokens.

        Args:
            collapse: The statistics.
            sequences: Batch index of each, int64 `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, int64 `[N]`.
            last: The largest index.
        """
        self._reserve(last + 1)
        self._logit_stats[sequences, indices] = collapse.statistics.to(self.device)

    def note_logits(self, logits: Tensor, sequences: Ints, indices: Ints, repetitions: Sequence[Repetition]) -> None:
        """Notes the logits `[N, V]` of some tokens, those of a sequence in order.

        Args:
            logits: `[N, V]`.
            sequences: Batch index of each, int64 `[N]`.
            indices: Index of each among the new tokens of its sequence, from 0, int64 `[N]`.
            repetitions: Repetition among the new ids of every sequence of the batch, these included.
        """
        self._noted_logits.append((logits, sequences, indices, repetitions))
        self._logit_rows += len(sequences)
        if self._logit_rows >= max(_LOGITS, len(self._drops)):
            self._flush_logits()

    def _flush_loops(self) -> None:
        """Computes the statistics of all noted loops."""
        self._apply_opens()
        noted, self._noted, self._rows = self._noted, [], 0
        if not noted:
            return
        numbers = np.repeat([note[0] for note in noted], [len(note[1]) for note in noted])
        sequences, cache_positions, loops = (np.concatenate([note[part] for note in noted]) for part in (1, 2, 3))
        parts = [note[4] for note in noted]
        if self._unfinished is not None:
            (*before, states), rows = self._unfinished, (numbers, sequences, cache_positions, loops)
            numbers, sequences, cache_positions, loops = map(np.concatenate, zip(before, rows, strict=True))
            parts, self._unfinished = [states, *parts], None
        indices = cache_positions - self.first_position
        opened = np.where(indices < 0, _CLOSED, self._opened[sequences, indices])
        valid = np.flatnonzero((opened != _CLOSED) & (numbers >= opened))
        self._write_statistics(parts, valid, sequences, indices, loops)

    def _apply_opens(self) -> None:
        """Applies `open` and `forget` in their order, and discards statistics computed before them."""
        opens, self._opens = self._opens, []
        if not opens:
            return
        before = self._opened.copy()
        for closes, group in groupby(opens, key=lambda note: note[0] == _CLOSED):
            numbers, sequences, first = zip(*group, strict=True)
            if closes:
                for sequence, index in zip(sequences, first, strict=True):
                    self._opened[sequence, index:] = _CLOSED
                continue
            indices = np.concatenate(first) - self.first_position
            if len(indices) and indices.max() >= self._opened.shape[1]:
                self._reserve(int(indices.max()) + 1)
            # of a token that is opened twice the last number stays
            self._opened[np.concatenate(sequences), indices] = np.repeat(numbers, [len(part) for part in first])
        changed = np.argwhere((before != _CLOSED) & (before != self._opened[:, : before.shape[1]]))
        if len(changed):
            at = to_device(changed.T.copy(), self.device)
            self._loops[at[0], at[1]] = torch.nan
            self._fates[at[0], at[1]] = 0

    def _write_statistics(
        self,
        noted_values: list[tuple[Tensor, Tensor] | Tensor],
        valid: Ints,
        sequences: Ints,
        indices: Ints,
        loops: Ints,
    ) -> None:
        if not len(valid):
            return
        everything = len(valid) == len(loops)
        sequences, indices, loops = (index[valid] for index in (sequences, indices, loops))
        at = to_device(np.stack([sequences, indices, loops]), self.device)
        states = [value for value in noted_values if isinstance(value, Tensor)]
        if not states:
            rows = to_device(valid, self.device)
            statistics, fates = (
                torch.cat([value[part] for value in noted_values]).to(self.device)[rows] for part in (0, 1)
            )
        else:
            assert len(states) == len(noted_values) and self._reader is not None
            hidden = torch.cat(states)  # [R, D]
            hidden = hidden if everything else hidden.index_select(0, to_device(valid, hidden.device))
            keys = sequences * self._fates.shape[1] + indices
            known = np.zeros(keys.max() + 1, dtype=np.bool_)
            known[keys] = True
            numbers = known.cumsum() - 1
            row_tokens = numbers[keys]  # [R]
            paths = hidden.new_zeros((int(numbers[-1]) + 1, self._fates.shape[2], hidden.shape[1]))
            where = to_device(np.stack([row_tokens, loops]), hidden.device)
            paths[where[0], where[1]] = hidden
            statistics, fates = (part[where[0], where[1]].to(self.device) for part in self._reader.read(paths))
            self._keep_open(hidden, sequences, indices, loops, row_tokens)
        self._loops[at[0], at[1], at[2]] = statistics
        self._fates[at[0], at[1], at[2]] = fates.to(torch.int8)

    def _keep_open(self, hidden: Tensor, sequences: Ints, indices: Ints, loops: Ints, row_tokens: Ints) -> None:
        """Keeps the states of tokens whose loops are not over; later loops are compared with them."""
        total = self._fates.shape[2]
        # a token is at most T passes old while it loops, and one enters in a pass at most
        newest = self._opened.shape[1] - 1 - (self._opened != _CLOSED)[:, ::-1].argmax(axis=1)
        ran = np.zeros(row_tokens.max() + 1, dtype=np.int64)
        np.maximum.at(ran, row_tokens, loops + 1)
        rows = np.flatnonzero((ran[row_tokens] < total) & (indices > newest[sequences] - total))
        if len(rows):
            sequences, indices, loops = sequences[rows], indices[rows], loops[rows]
            kept = hidden.index_select(0, to_device(rows, hidden.device))
            numbers, cache_positions = self._opened[sequences, indices], indices + self.first_position
            self._unfinished = (numbers, sequences, cache_positions, loops, kept)

    @torch.no_grad()
    def _flush_logits(self) -> None:
        """Computes the statistics of all noted logits."""
        noted, self._noted_logits, self._logit_rows = self._noted_logits, [], 0
        if not noted:
            return
        sequences, indices = (np.concatenate([note[part] for note in noted]) for part in (1, 2))
        repetitions = noted[-1][3]
        repeated = [repetitions[sequence].at(index) for sequence, index in zip(sequences, indices, strict=True)]
        drops = [self._drops[sequence] for sequence in sequences]
        statistics = compute_logit_stats(torch.cat([note[0] for note in noted]), repeated, drops)
        if int(indices.max()) >= self._logit_stats.shape[1]:
            self._reserve(int(indices.max()) + 1)
        at = to_device(np.stack([sequences, indices]), self.device)
        self._logit_stats[at[0], at[1]] = statistics.to(self.device)

    def _reserve(self, new: int) -> None:
        batch, room, total_loops = self._fates.shape
        if new > room:
            more = max(new, 2 * room) - room
            with torch.inference_mode(False):
                fresh = _blank(batch, more, total_loops, self._fates.device)
                old = (self._loops, self._fates, self._logit_stats)
                self._loops, self._fates, self._logit_stats = (
                    torch.cat(pair, dim=1) for pair in zip(old, fresh, strict=True)
                )
            self._opened = np.pad(self._opened, ((0, 0), (0, more)), constant_values=_CLOSED)


def compute_logit_stats(logits: Tensor, repeated: Sequence[Repeated], drops: Sequence[EntropyDrop]) -> Tensor:
    """Statistics of logits as `Operations.collapse` has them, float32 `[N, 8]`, with repetition counted on the host.

    Args:
        logits: `[N, V]`, those of a sequence in order.
        repeated: Repetition of the sequence after each token.
        drops: Entropy statistics of the sequence of each token; updated.
    """
    entropy, margin, _, finite = (part.cpu().numpy() for part in certainty(logits))
    drop = np.array([drop.take(value) for drop, value in zip(drops, entropy.tolist(), strict=True)], dtype=np.float32)
    numbers = [(state.periodicity, state.lag, state.echo, state.distinct, state.echo_weight) for state in repeated]
    periodicity, lag, echo, distinct, echo_weight = np.array(numbers, dtype=np.float32).T
    shown = np.where(finite, margin, 0)
    proximity = CollapseRule().proximity(periodicity, echo * echo_weight, 1 - distinct, drop, shown)
    return torch.from_numpy(np.stack([entropy, margin, drop, periodicity, lag, echo, distinct, proximity], axis=-1))


def _blank(batch: int, new: int, total_loops: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch, new, total_loops, len(STATISTICS)), torch.nan, dtype=torch.float32, device=device),
        torch.zeros((batch, new, total_loops), dtype=torch.int8, device=device),
        torch.full((batch, new, len(LOGIT_STATS)), torch.nan, dtype=torch.float32, device=device),
    )
