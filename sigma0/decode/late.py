"""The late runner: a step is one call, and what it emits is read while the next one runs.

The host launches step k + 1 before it waits for step k, so a device always has work. It knows the rows of a step only
up to a bound: those that were live after the last step it has read, and one entrant for each live sequence and step
under way. Ends by ids and lengths are taken on the device; what the host alone decides comes a step late. Where the
host has to see a step before the next one, the same steps run without that lag.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.prefill import Prefill
from sigma0.decode.runner import Choice, EagerRunner, RunnerChoice, Step, Storage
from sigma0.decode.settings import SequenceSettings
from sigma0.decode.step import EMITTED, FRESH, LINE_WIDTH, run_prefill
from sigma0.decode.transfer import Landing, PassCounts
from sigma0.decode.whole_step import DECODING, LIVE, SEQUENCES, take_lines, whole_step


class LateRunner(EagerRunner):
    """Runs whole steps, and reads each one while the next runs, or at once where the host has to see it first.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V.
        counts: What was computed, of the steps that were read; updated.
        chosen: What was chosen, and why.

    Attributes:
        shows_lanes: Whether the table of lanes comes to the host with what a step emits, as `Step.table`.
    """

    def __init__(
        self,
        model: LoopedModel,
        lanes: Lanes,
        settings: SequenceSettings,
        storage: Storage,
        counts: PassCounts,
        chosen: RunnerChoice,
    ) -> None:
        super().__init__(model, lanes, settings, storage, counts, chosen)
        self.lag = int(chosen.late)
        self.shows_lanes = False
        self._under_way: deque[tuple[Landing, Tensor]] = deque()
        # lanes and sequences that were live after the last step that was read; None before the first
        self._seen: tuple[int, int] | None = None

    def expect(self, live: int, sequences: int) -> None:
        """Takes it from the host how many lanes are live before the next step, and of how many sequences."""
        self._seen = live, sequences

    def forget(self) -> None:
        """Drops what is under way: nobody reads it."""
        self._under_way.clear()
        self._seen = None

    def step(self, longest: int, choice: Choice, beside: Prefill | None = None) -> Step | None:
        """Launches a step, the first time `lag` more, and then reads the oldest that is under way.

        Args:
            longest: Bound on the cache positions of the step, plus one: what is known of, and `lag` more.
            choice: How ids are chosen; on the device, where there is a lag.
            beside: Prefill that runs a loop before the lanes; nothing, where there is a lag.

        Returns:
            What was read; None where nothing is in flight, or under way, any more.
        """
        assert not self.lag or (choice.on_device and not beside), "what the host has to see runs without a lag"
        if not choice.on_device:
            return super().step(longest, choice, beside)
        if beside:
            self.counts.prompt_rows += len(beside)
            run_prefill(self.batch(longest), beside)
        while len(self._under_way) <= self.lag and (bound := self._bound()):
            self._under_way.append(self._launch(longest, choice, bound))
        if self._under_way:
            return self._read()
        if not beside:
            return None
        self.counts.passes += 1
        return Step(np.zeros((0, LINE_WIDTH), dtype=np.int64), 0)

    def _bound(self) -> int:
        """Rows of the coming step at most, in powers of two; 0 where there are none."""
        if self._seen is None:
            stages = self.lanes.stages().reshape(self.lanes.sequences, self.lanes.depth)
            live = stages < self.lanes.idle
            self._seen = int(live.sum()), int(live.any(axis=1).sum())
        live_lanes, sequences = self._seen
        if not live_lanes:
            return 0
        rows = live_lanes + sequences * len(self._under_way)
        return min(1 << (rows - 1).bit_length(), self.lanes.count)

    def _launch(self, longest: int, choice: Choice, count: int) -> tuple[Landing, Tensor]:
        """Lines on their way to the host, and the logits, which the next launch may change."""
        lines, logits = whole_step(self.batch(longest), count, choice, suspends=self.chosen.late)
        return self._land(lines), logits

    def _land(self, lines: Tensor) -> Landing:
        """Sends what a step has emitted to the host, and the table as it is behind the step."""
        if not self.shows_lanes:
            return Landing(lines)
        return Landing(torch.cat([lines.flatten(), self.lanes.table[:-1].flatten()]))

    def _read(self) -> Step:
        landing, logits = self._under_way.popleft()
        landed, table = landing.array(), None
        if self.shows_lanes:
            width = self.lanes.table.shape[1]
            behind = landed.size - self.lanes.count * width
            landed, table = landed[:behind].reshape(-1, LINE_WIDTH), landed[behind:].reshape(-1, width)
        lines, counted = take_lines(landed, self.program, self.counts)
        # without a lag the host may change the lanes before the next step
        self._seen = (int(counted[LIVE]), int(counted[SEQUENCES])) if self.lag else None
        rows = np.flatnonzero(lines[:, EMITTED] | lines[:, FRESH])
        return Step(lines[rows], int(counted[DECODING]), None, None if self.lag else logits, rows, table)
