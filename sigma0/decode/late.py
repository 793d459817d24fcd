"""The late runner: a step is one call, and what it emits is read while the next one runs.

The host launches step k + 1 before it waits for step k, so a device always has work. It knows the rows of a step only
up to a bound: those that were live after the last step it has read, and one entrant for each live sequence and step
under way. Ends by ids and lengths are taken on the device; what the host alone decides comes a step late.
"""

from collections import deque

from sigma0.decode.batch import PassCounts
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.prefill import Prefill
from sigma0.decode.runner import Choice, EagerRunner, RunnerChoice, Step, Storage
from sigma0.decode.settings import SequenceSettings
from sigma0.decode.step import EMITTED, FRESH
from sigma0.decode.transfer import Landing
from sigma0.decode.whole_step import DECODING, LIVE, SEQUENCES, take_lines, whole_step


class LateRunner(EagerRunner):
    """Runs whole steps, and reads each one while the next runs.

    Args:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        storage: K/V.
        counts: What was computed, of the steps that were read; updated.
        chosen: What was chosen, and why.
    """

    lag = 1

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
        self._under_way: deque[Landing] = deque()
        # lanes and sequences that were live after the last step that was read; None before the first
        self._seen: tuple[int, int] | None = None

    def step(self, longest: int, choice: Choice, beside: Prefill | None = None) -> Step | None:
        """Launches a step, the first time two, and then reads the oldest that is under way.

        Args:
            longest: Bound on the cache positions of the step, plus one: what is known of, and `lag` more.
            choice: How ids are chosen, on the device.
            beside: Nothing.

        Returns:
            What was read; None where nothing is in flight, or under way, any more.
        """
        assert not beside, "prefill runs with a runner that waits"
        while len(self._under_way) <= self.lag and (bound := self._bound()):
            self._launch(longest, choice, bound)
        return self._read() if self._under_way else None

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

    def _launch(self, longest: int, choice: Choice, count: int) -> None:
        self._under_way.append(Landing(whole_step(self.batch(longest), count, choice)[0]))

    def _read(self) -> Step:
        lines, counted = take_lines(self._under_way.popleft().array(), self.program, self.counts)
        self._seen = int(counted[LIVE]), int(counted[SEQUENCES])
        return Step(lines[(lines[:, EMITTED] > 0) | (lines[:, FRESH] > 0)], int(counted[DECODING]))
