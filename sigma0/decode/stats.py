"""What a run tells of its new tokens: statistics of every loop, and of the reading.

No token depends on any of it, so a pass only notes what it saw: its states, or the statistics where a kernel or the
exit rule has them already, and the logits of its tokens. They are worked out together, when somebody looks or when
enough has come together; what is kept until then is bounded.
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
    READINGS,
    STATISTICS,
    Boundary,
    BoundaryRule,
    Collapse,
    CollapseRule,
    CollapseState,
    certainty,
    observe_paths,
)
from sigma0.decode.repetition import EntropyDrop, Repeated, Repetition
from sigma0.decode.transfer import to_device

# Rows of states and rows of logits that are kept before they are worked out; more in a batch, for which it holds at
# least as many passes.
_STATES, _LOGITS, _PASSES = 512, 64, 4
# Never entered by a wave, or taken back.
_CLOSED = -1


@dataclass(frozen=True)
class PathReader:
    """What works out the statistics of loop states.

    Attributes:
        gate: Gate logits `[N]` of normed states `[N, D]`.
        rule: What spirals and diverges.
    """

    gate: Callable[[Tensor], Tensor]
    rule: BoundaryRule

    @torch.no_grad()
    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics float32 `[N, T, 8]` and fates `[N, T]` of states `[N, T, D]`."""
        gates = self.gate(states.flatten(0, 1)).view(states.shape[:2])
        return observe_paths(states, gates, self.rule)


class RunRecord:
    """Statistics of new tokens; token i of a sequence is read from the position before it.

    Args:
        batch: B.
        new: New tokens that there is room for; grows as needed.
        total_loops: T.
        device: Where the figures are told.

    Attributes:
        first_column: Column of the planes whose state the first new token is read from.
        pending: Logits `[B, V]` of tokens that a foreign loop is about to choose; None elsewhere.
    """

    def __init__(self, batch: int, new: int, total_loops: int, device: torch.device) -> None:
        self.first_column = 0
        self.pending: Tensor | None = None
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self._loops, self._fates, self._readings = _blank(batch, new, total_loops, device)
        # the pass from which on what is noted of a place counts, as far as it is taken in
        self._opened: Ints = np.full((batch, new), _CLOSED, dtype=np.int64)
        self._number = 0
        # passes, each with its number, the rows' sequences, columns and loops, and what was told of them
        self._noted: list[tuple[int, Ints, Ints, Ints, tuple[Tensor, Tensor] | Tensor]] = []
        # states of tokens whose loops are not over, as they were noted, with a number for each row
        self._unfinished: tuple[Ints, Ints, Ints, Ints, Tensor] | None = None
        # the number from which on columns of sequences count, or the first place that is taken back
        self._opens: list[tuple[int, Any, Any]] = []
        self._rows, self._most_rows = 0, max(_STATES, _PASSES * batch * total_loops)
        self._reader: PathReader | None = None
        self._read: list[tuple[Tensor, Ints, Ints, Sequence[Repetition]]] = []
        self._logits = 0
        self._drops = [EntropyDrop() for _ in range(batch)]

    @classmethod
    def empty(cls, batch: int, new: int, total_loops: int, device: torch.device) -> "RunRecord":
        """Nothing told yet; grows beyond `new` tokens as needed."""
        return cls(batch, new, total_loops, device)

    @cached_property
    def collapse(self) -> CollapseState:
        """What readings are reckoned from where a kernel does it at once."""
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
        self._settle_loops()
        return self._loops

    @property
    def fates(self) -> Tensor:
        """Index into `sigma0.decode.ops.FATES`, int8 `[B, new, T]`; 0 where there is none."""
        self._settle_loops()
        return self._fates

    @property
    def readings(self) -> Tensor:
        """entropy, margin, drop, periodicity, lag, echo, distinct and proximity, float32 `[B, new, 8]`.

        NaN where no token was told.
        """
        self._settle_readings()
        return self._readings

    def put_prompt(self, statistics: Tensor, fates: Tensor, column: int) -> None:
        """The loops of the position that every first new token is read from.

        Args:
            statistics: `[T', B, 8]`.
            fates: `[T', B]`.
            column: Its column.
        """
        self._begin(column)
        self._loops[:, 0, : len(statistics)] = statistics.transpose(0, 1)
        self._fates[:, 0, : len(fates)] = fates.transpose(0, 1).to(torch.int8)

    def note_prompt(self, states: Tensor, column: int, reader: PathReader) -> None:
        """Likewise, by its states `[T', B, D]`."""
        self._begin(column)
        loops, batch, _ = states.shape
        self._opened[:, 0], self._reader = self._number, reader
        columns, each = np.full(loops * batch, column), np.tile(np.arange(batch), loops)
        self._note(states.detach().flatten(0, 1), each, columns, np.repeat(np.arange(loops), batch))

    def _begin(self, column: int) -> None:
        self._settle_loops()
        self.first_column = column
        # rows of earlier tokens are run to their end before another prompt is read
        self._noted, self._rows, self._unfinished = [], 0, None

    def open(self, sequences: Ints, columns: Ints) -> None:
        """Forgets what was told of positions that are run anew.

        Args:
            sequences: Batch index, int64 `[N]`.
            columns: `[N]`.
        """
        self._opens.append((self._number, sequences, columns))

    def forget(self, sequence: int, first: int) -> None:
        """Tells nothing of the loops of a sequence's tokens from number `first` on: they were taken back."""
        self._opens.append((_CLOSED, sequence, first))

    def put(self, boundary: Boundary, sequences: Ints, columns: Ints, loops: Ints) -> None:
        """One loop of some rows.

        Args:
            boundary: What was told of them.
            sequences: Batch index of each, int64 `[R]`.
            columns: `[R]`.
            loops: The finished loop, counted from 0, `[R]`.
        """
        self._note((boundary.statistics, boundary.fates), sequences, columns, loops)

    def note(self, states: Tensor, sequences: Ints, columns: Ints, loops: Ints, reader: PathReader) -> None:
        """Likewise, by its states `[R, D]`, for the reader to work out."""
        self._reader = reader
        self._note(states, sequences, columns, loops)

    def _note(self, told: tuple[Tensor, Tensor] | Tensor, sequences: Ints, columns: Ints, loops: Ints) -> None:
        self._noted.append((self._number, sequences, columns, loops, told))
        self._number += 1
        self._rows += len(sequences)
        if self._rows >= self._most_rows:
            self._settle_loops()

    def read(self, collapse: Collapse, sequences: Tensor, places: Tensor, last: int) -> None:
        """The reading of some tokens.

        Args:
            collapse: What was told of them.
            sequences: Batch index of each, int64 `[N]`.
            places: Which new token of its sequence each is, from 0, int64 `[N]`.
            last: The largest place.
        """
        self._reserve(last + 1)
        self._readings[sequences, places] = collapse.statistics.to(self.device)

    def note_reading(self, logits: Tensor, sequences: Ints, places: Ints, texts: Sequence[Repetition]) -> None:
        """Likewise, by their logits `[N, V]`, each sequence's tokens in their order.

        Args:
            logits: What they were read from.
            sequences: Batch index of each, int64 `[N]`.
            places: Which new token of its sequence each is, from 0, int64 `[N]`.
            texts: The new ids of every sequence of the batch, these among them.
        """
        self._read.append((logits, sequences, places, texts))
        self._logits += len(sequences)
        if self._logits >= max(_LOGITS, len(self._drops)):
            self._settle_readings()

    def _settle_loops(self) -> None:
        """Works out what was noted of loops."""
        self._settle_opens()
        noted, self._noted, self._rows = self._noted, [], 0
        if not noted:
            return
        numbers = np.repeat([each[0] for each in noted], [len(each[1]) for each in noted])
        sequences, columns, loops = (np.concatenate([each[part] for each in noted]) for part in (1, 2, 3))
        parts = [each[4] for each in noted]
        if self._unfinished is not None:
            (*before, states), rows = self._unfinished, (numbers, sequences, columns, loops)
            numbers, sequences, columns, loops = map(np.concatenate, zip(before, rows, strict=True))
            parts, self._unfinished = [states, *parts], None
        places = columns - self.first_column
        opened = np.where(places < 0, _CLOSED, self._opened[sequences, places])
        valid = np.flatnonzero((opened != _CLOSED) & (numbers >= opened))
        self._settle_told(parts, valid, sequences, places, loops)

    def _settle_opens(self) -> None:
        """Takes in what was run anew or taken back, in its order; it forgets what was told of it before."""
        opens, self._opens = self._opens, []
        if not opens:
            return
        before = self._opened.copy()
        for closes, group in groupby(opens, key=lambda each: each[0] == _CLOSED):
            numbers, sequences, first = zip(*group, strict=True)
            if closes:
                for sequence, place in zip(sequences, first, strict=True):
                    self._opened[sequence, place:] = _CLOSED
                continue
            places = np.concatenate(first) - self.first_column
            if len(places) and places.max() >= self._opened.shape[1]:
                self._reserve(int(places.max()) + 1)
            # of a place that is opened twice the last number stays
            self._opened[np.concatenate(sequences), places] = np.repeat(numbers, [len(each) for each in first])
        changed = np.argwhere((before != _CLOSED) & (before != self._opened[:, : before.shape[1]]))
        if len(changed):
            at = to_device(changed.T.copy(), self.device)
            self._loops[at[0], at[1]] = torch.nan
            self._fates[at[0], at[1]] = 0

    def _settle_told(
        self, told: list[tuple[Tensor, Tensor] | Tensor], valid: Ints, sequences: Ints, places: Ints, loops: Ints
    ) -> None:
        if not len(valid):
            return
        everything = len(valid) == len(loops)
        sequences, places, loops = (each[valid] for each in (sequences, places, loops))
        at = to_device(np.stack([sequences, places, loops]), self.device)
        states = [each for each in told if isinstance(each, Tensor)]
        if not states:
            rows = to_device(valid, self.device)
            statistics, fates = (torch.cat([each[part] for each in told]).to(self.device)[rows] for part in (0, 1))
        else:
            assert len(states) == len(told) and self._reader is not None
            hidden = torch.cat(states)  # [R, D]
            hidden = hidden if everything else hidden.index_select(0, to_device(valid, hidden.device))
            keys = sequences * self._fates.shape[1] + places
            known = np.zeros(keys.max() + 1, dtype=np.bool_)
            known[keys] = True
            numbers = known.cumsum() - 1
            row_tokens = numbers[keys]  # [R]
            paths = hidden.new_zeros((int(numbers[-1]) + 1, self._fates.shape[2], hidden.shape[1]))
            where = to_device(np.stack([row_tokens, loops]), hidden.device)
            paths[where[0], where[1]] = hidden
            statistics, fates = (part[where[0], where[1]].to(self.device) for part in self._reader.read(paths))
            self._keep_open(hidden, sequences, places, loops, row_tokens)
        self._loops[at[0], at[1], at[2]] = statistics
        self._fates[at[0], at[1], at[2]] = fates.to(torch.int8)

    def _keep_open(self, hidden: Tensor, sequences: Ints, places: Ints, loops: Ints, row_tokens: Ints) -> None:
        """Keeps the states of tokens whose loops are not over: what comes is measured against them."""
        total = self._fates.shape[2]
        # a token is at most T passes old while it loops, and one enters in a pass at most
        newest = self._opened.shape[1] - 1 - (self._opened != _CLOSED)[:, ::-1].argmax(axis=1)
        ran = np.zeros(row_tokens.max() + 1, dtype=np.int64)
        np.maximum.at(ran, row_tokens, loops + 1)
        rows = np.flatnonzero((ran[row_tokens] < total) & (places > newest[sequences] - total))
        if len(rows):
            sequences, places, loops = sequences[rows], places[rows], loops[rows]
            kept = hidden.index_select(0, to_device(rows, hidden.device))
            numbers, columns = self._opened[sequences, places], places + self.first_column
            self._unfinished = (numbers, sequences, columns, loops, kept)

    @torch.no_grad()
    def _settle_readings(self) -> None:
        """Works out what was noted of readings."""
        read, self._read, self._logits = self._read, [], 0
        if not read:
            return
        sequences, places = (np.concatenate([each[part] for each in read]) for part in (1, 2))
        texts = read[-1][3]
        repeated = [texts[sequence].at(place) for sequence, place in zip(sequences, places, strict=True)]
        drops = [self._drops[sequence] for sequence in sequences]
        statistics = read_together(torch.cat([each[0] for each in read]), repeated, drops)
        if int(places.max()) >= self._readings.shape[1]:
            self._reserve(int(places.max()) + 1)
        at = to_device(np.stack([sequences, places]), self.device)
        self._readings[at[0], at[1]] = statistics.to(self.device)

    def _reserve(self, new: int) -> None:
        batch, room, total_loops = self._fates.shape
        if new > room:
            more = max(new, 2 * room) - room
            with torch.inference_mode(False):
                fresh = _blank(batch, more, total_loops, self._fates.device)
                old = (self._loops, self._fates, self._readings)
                self._loops, self._fates, self._readings = (
                    torch.cat(pair, dim=1) for pair in zip(old, fresh, strict=True)
                )
            self._opened = np.pad(self._opened, ((0, 0), (0, more)), constant_values=_CLOSED)


def read_together(logits: Tensor, repeated: Sequence[Repeated], drops: Sequence[EntropyDrop]) -> Tensor:
    """What `Operations.collapse` tells of tokens, float32 `[N, 8]` on the host, of the ids counted there.

    Args:
        logits: That they were read from, `[N, V]`, each text's in their order.
        repeated: How its text repeats itself behind each.
        drops: Of its text, for each; takes its entropy in.
    """
    entropy, margin, _, speaks = (part.cpu().numpy() for part in certainty(logits))
    drop = np.array([drop.take(value) for drop, value in zip(drops, entropy.tolist(), strict=True)], dtype=np.float32)
    told = [(each.periodicity, each.lag, each.echo, each.distinct, each.settled) for each in repeated]
    periodicity, lag, echo, distinct, settled = np.array(told, dtype=np.float32).T
    proximity = CollapseRule().proximity(periodicity, echo * settled, 1 - distinct, drop, np.where(speaks, margin, 0))
    return torch.from_numpy(np.stack([entropy, margin, drop, periodicity, lag, echo, distinct, proximity], axis=-1))


def _blank(batch: int, new: int, total_loops: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch, new, total_loops, len(STATISTICS)), torch.nan, dtype=torch.float32, device=device),
        torch.zeros((batch, new, total_loops), dtype=torch.int8, device=device),
        torch.full((batch, new, len(READINGS)), torch.nan, dtype=torch.float32, device=device),
    )
