"""One simulated replica: the engine's own scheduler, with a clock where the engine has a model.

A pass is `Scheduler.schedule`, a time by what the pass holds, and `Scheduler.feed` with made-up ids and measured
exits. Queue, slots, chunks of prompts, blocks, prefix cache and preemption are the scheduler's; rows in flight are
counted in `flight.py`. Full depth is the same with every exit at T. Not simulated: cancelled requests, `drop`, `verify`
and coded K/V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from sigma0.bench.simulation.flight import Flight
from sigma0.bench.simulation.request import Request
from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry

# Ids of a chat count its positions; those of the next chat begin so much later.
_TEXT = 2**32


@dataclass(frozen=True)
class ReplicaLimits:
    """Of one replica, as `EngineLimits` has them.

    Attributes:
        loops: T.
        running: Requests that share passes at most.
        pass_rows: Rows that prompts may bring a pass up to.
        page: Columns of a block of K/V: a prefix is found in whole ones.
        kept: Columns of K/V, for running texts and remembered ones together.
        waiting: Requests in the queue at most, beside those that could run at once.

    Raises:
        ValueError: For a number that is too small.
    """

    loops: int
    running: int = 16
    pass_rows: int = 256
    page: int = 16
    kept: int = 2**16
    waiting: int = 64

    def __post_init__(self) -> None:
        least = {"loops": 1, "running": 1, "pass_rows": 1, "page": 1, "kept": self.page, "waiting": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")


class PassWork(NamedTuple):
    """What a pass holds.

    Attributes:
        rows: Of all requests.
        chunks: Of prompts, among them.
        requests: That run.
        tokens: That it tells.
        begun: Requests that are admitted.
        ended: Requests whose last token it tells.
    """

    rows: int
    chunks: int
    requests: int
    tokens: int
    begun: int
    ended: int


class Replica:
    """An engine without a model.

    Args:
        limits: What it may hold.
        seconds: Time of a pass by what it holds.

    Attributes:
        scheduler: The engine's.
        rows_run: Rows in all passes so far.
    """

    def __init__(self, limits: ReplicaLimits, seconds: Callable[[PassWork], float]) -> None:
        self.limits = limits
        self.seconds = seconds
        pool = BlockPool(limits.kept // limits.page, limits.page)
        self.scheduler = Scheduler(pool, limits.running, limits.waiting, limits.pass_rows)
        self.rows_run = 0
        self._flight = Flight(limits.loops, limits.page)
        self._requests: dict[int, Request] = {}
        self._recomputing: list[Request] = []
        self._keys = count()
        self._busy = self._used = self._until = 0.0

    @property
    def passes(self) -> int:
        """So far."""
        return self._flight.passes

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything."""
        return self.load > 0

    @property
    def has_room(self) -> bool:
        """Whether a request that came now could run at once."""
        return self.load < self.limits.running

    @property
    def is_full(self) -> bool:
        """Whether a request that came now would be refused, as `Engine.submit` does with `Busy`."""
        return self.scheduler.is_full

    def add(self, request: Request) -> None:
        """Queues a request."""
        assert request.prompt >= 1 and request.depths, "a request reads and writes at least one column"
        length, key = request.prompt, next(self._keys)
        if request.text is None:
            base = _TEXT * (request.session if request.session >= 0 else -1 - key)
            request.text = range(base, base + length + len(request.depths))
        request.entry = SequenceEntry(key, list(request.text[:length]), length, length - 1, window=self.limits.loops)
        self._requests[key] = request
        self.scheduler.add(request.entry)

    def remember(self, session: int, columns: int) -> None:
        """Leaves a chat in the prefix cache, as if its last turn had ended so many columns behind its beginning."""
        base = _TEXT * session
        entry = SequenceEntry(next(self._keys), list(range(base, base + columns)), columns, columns)
        self.scheduler.add(entry)
        self.scheduler.admit()
        if entry.slot >= 0:
            self.scheduler.register(entry, columns)
        self.scheduler.remove(entry)

    def begin_pass(self, now: float) -> float:
        """Lets rows enter; seconds that the pass will take."""
        flight, requests = self._flight, self._requests
        step = self.scheduler.schedule(flight.rows)
        for entry, _ in step.preempted:
            self._preempt(requests[entry.key])
        for entry in step.admitted:
            request = requests[entry.key]
            if request.saved is not None:
                self._recomputing.append(request)
            if not entry.preemptions:
                request.started, request.cached = now, entry.cached
        for entry, start, stop in step.prefill:
            flight.enter(requests[entry.key], start, stop)
        if self._recomputing:
            self._resume()
        due, running = flight.due, len(self.scheduler.running)
        ended = 0
        for request in due:
            ended += request.told + 1 == len(request.depths)
        seconds = self.seconds(PassWork(flight.rows, flight.chunks, running, len(due), len(step.admitted), ended))
        self._busy += seconds
        self._used += seconds * running
        self._until = now + seconds
        return seconds

    def used(self, now: float) -> tuple[float, float]:
        """Seconds in passes until now, and requests that ran, summed over those seconds."""
        left = max(0.0, self._until - now)
        return self._busy - left, self._used - left * len(self.scheduler.running)

    def end_pass(self, now: float) -> list[Request]:
        """Tells tokens and lets rows leave; the requests that are over."""
        flight = self._flight
        self.rows_run += flight.rows
        due, complete = flight.land()
        if not due and not complete:
            return []
        ended: list[Request] = []
        for request in due:
            if not request.told:
                request.first = now
            request.told += 1
            if request.told == len(request.depths):
                request.ended = now
                ended.append(request)
                continue
            assert request.text is not None
            position = request.prompt - 1 + request.told
            self.scheduler.feed(request.sequence, position, request.text[position])
            flight.enter_token(request, position, 0)
        for key, positions in complete.items():
            self.scheduler.register(self._requests[key].sequence, positions)
        for request in ended:
            self.scheduler.remove(request.sequence)
            flight.drop(request)
            del self._requests[request.sequence.key]
        return ended

    def _preempt(self, request: Request) -> None:
        # preempted again while it recomputes, it still has what was in flight before
        request.saved = self._flight.drop(request) or request.saved
        if request in self._recomputing:
            self._recomputing.remove(request)

    def _resume(self) -> None:
        """Puts the tokens of preempted requests in flight again once all positions before them are recomputed."""
        for request in list(self._recomputing):
            if not request.sequence.remaining and not self._flight.has(request):
                assert request.saved is not None
                self._recomputing.remove(request)
                saved, request.saved = request.saved, None
                for position, ran in saved.items():
                    self._flight.enter_token(request, position, ran)
