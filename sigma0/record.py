"""What a run tells of its new tokens: statistics of every loop, and of the reading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.ops import READINGS, STATISTICS, Boundary, Collapse, CollapseState


@dataclass
class RunRecord:
    """Statistics of new tokens; token i of a sequence is read from the position before it.

    Attributes:
        loops: change, bend, gain, turning, radius, angle, residual and hazard after each loop, float32
            `[B, new, T, 8]`; NaN where no loop was run.
        fates: Index into `sigma0.ops.FATES`, int8 `[B, new, T]`; 0 where there is none.
        readings: entropy, margin, drop, periodicity, lag, echo, distinct and proximity, float32 `[B, new, 8]`; NaN
            where no token was told.
        collapse: What the last three are reckoned from.
        first_column: Column of the planes whose state the first new token is read from.
        pending: Logits `[B, V]` of tokens that a foreign loop is about to choose; None elsewhere.
    """

    loops: Tensor
    fates: Tensor
    readings: Tensor
    collapse: CollapseState
    first_column: int = 0
    pending: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.loops.device

    @classmethod
    def empty(cls, batch: int, new: int, total_loops: int, device: torch.device) -> "RunRecord":
        """Nothing told yet; grows beyond `new` tokens as needed."""
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            return cls(*_blank(batch, new, total_loops, device), CollapseState.empty(batch, device))

    def put_prompt(self, statistics: Tensor, fates: Tensor, column: int) -> None:
        """The loops of the position that every first new token is read from.

        Args:
            statistics: `[T', B, 8]`.
            fates: `[T', B]`.
            column: Its column.
        """
        self.first_column = column
        self.loops[:, 0, : len(statistics)] = statistics.transpose(0, 1)
        self.fates[:, 0, : len(fates)] = fates.transpose(0, 1).to(torch.int8)

    def open(self, sequences: Tensor, columns: Tensor, last: int) -> None:
        """Forgets what was told of positions that are run anew.

        Args:
            sequences: Batch index, int64 `[N]`.
            columns: `[N]`.
            last: The largest column.
        """
        self._reserve(last - self.first_column + 1)
        places = columns - self.first_column
        self.loops[sequences, places] = torch.nan
        self.fates[sequences, places] = 0

    def forget(self, sequence: int, first: int) -> None:
        """Tells nothing of the loops of a sequence's tokens from number `first` on: they were taken back."""
        self.loops[sequence, first:] = torch.nan
        self.fates[sequence, first:] = 0

    def put(self, boundary: Boundary, sequences: Tensor, columns: Tensor, loops: Tensor) -> None:
        """One loop of some rows.

        Args:
            boundary: What was told of them.
            sequences: Batch index of each, int64 `[R]`.
            columns: `[R]`.
            loops: The finished loop, counted from 0, `[R]`.
        """
        places = columns - self.first_column
        self.loops[sequences, places, loops] = boundary.statistics.to(self.device)
        self.fates[sequences, places, loops] = boundary.fates.to(self.device, torch.int8)

    def read(self, collapse: Collapse, sequences: Tensor, places: Tensor, last: int) -> None:
        """The reading of some tokens.

        Args:
            collapse: What was told of them.
            sequences: Batch index of each, int64 `[N]`.
            places: Which new token of its sequence each is, from 0, int64 `[N]`.
            last: The largest place.
        """
        self._reserve(last + 1)
        self.readings[sequences, places] = collapse.statistics.to(self.device)

    def _reserve(self, new: int) -> None:
        batch, room, total_loops = self.fates.shape
        if new > room:
            with torch.inference_mode(False):
                more = _blank(batch, max(new, 2 * room) - room, total_loops, self.fates.device)
                old = (self.loops, self.fates, self.readings)
                self.loops, self.fates, self.readings = (torch.cat(pair, dim=1) for pair in zip(old, more, strict=True))


def _blank(batch: int, new: int, total_loops: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch, new, total_loops, len(STATISTICS)), torch.nan, dtype=torch.float32, device=device),
        torch.zeros((batch, new, total_loops), dtype=torch.int8, device=device),
        torch.full((batch, new, len(READINGS)), torch.nan, dtype=torch.float32, device=device),
    )
