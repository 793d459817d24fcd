"""One simulated replica: the engine's own scheduler, with a clock where the engine has a model.

A pass is `Scheduler.schedule`, a time by what the pass holds, and `Scheduler.update` with made-up ids and measured
exits. Queue, slots, chunks of prompts, blocks, prefix cache and preemption are the scheduler's. What is counted here is
what `sigma0.serve.engine.batch` has in flight, under `finish`: a token enters in the pass after the one that told the
token before it, is told at its exit depth, and its row goes on to loop T. Full depth is the same with every exit at T.
Not simulated: cancelled requests, `drop`, `verify` and coded K/V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry, StepOutput

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


@dataclass(slots=True, eq=False)
class Request:
    """One text to be answered.

    Attributes:
        prompt: Columns of its prompt, at least 1.
        depths: Exit depth of each new token, at least one.
        kind: Of the traffic that it belongs to.
        session: Number of the chat that it is a turn of.
        text: Ids of prompt and answer; None for made-up ones, which turns of its chat alone begin with.
        number: In the order of arrival.
        arrived: Seconds.
        started: When it was first admitted.
        first: When its first token was told.
        ended: When its last was.
        cached: Columns of the prompt that were found.
        told: Tokens so far.
        refused: Whether it found everything full and went away.
        entry: Its sequence in the scheduler.
        saved: Loops of its tokens in flight when it was preempted, by position; None once they are in flight again.
    """

    prompt: int
    depths: tuple[int, ...]
    kind: str = ""
    session: int = -1
    text: Sequence[int] | None = None
    number: int = -1
    arrived: float = 0.0
    started: float = -1.0
    first: float = -1.0
    ended: float = -1.0
    cached: int = 0
    told: int = 0
    refused: bool = False
    entry: SequenceEntry | None = None
    saved: dict[int, int] | None = None


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


class _Rows(NamedTuple):
    """Rows of a request that leave together.

    Attributes:
        request: Whose.
        count: How many.
        stop: One past the last position.
        in_lane: Whether it is a token that decodes; else a chunk of the prompt.
        is_exact: Whether the positions are exact in every plane with that.
    """

    request: Request
    count: int
    stop: int
    in_lane: bool
    is_exact: bool


class Replica:
    """An engine without a model.

    Args:
        limits: What it may hold.
        seconds: Time of a pass by what it holds.

    Attributes:
        scheduler: The engine's.
        passes: So far.
        rows_run: Rows in them.
    """

    def __init__(self, limits: ReplicaLimits, seconds: Callable[[PassWork], float]) -> None:
        self.limits = limits
        self.seconds = seconds
        pool = BlockPool(limits.kept // limits.page, limits.page)
        self.scheduler = Scheduler(pool, limits.running, limits.waiting, limits.pass_rows)
        self.passes = 0
        self.rows_run = 0
        self._requests: dict[int, Request] = {}
        self._keys = count()
        self._busy = self._used = self._until = 0.0
        self._rows = self._chunks = 0
        # what happens at the end of a pass, by its number modulo T + 1; a row that enters in one leaves T - 1 later
        self._around = limits.loops + 1
        self._due: list[list[Request]] = [[] for _ in range(self._around)]
        self._leaving: list[list[_Rows]] = [[] for _ in range(self._around)]
        self._recomputing: list[Request] = []

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
        step = self.scheduler.schedule(self._rows)
        for entry, _ in step.preempted:
            self._preempt(self._requests[entry.key])
        for entry in step.admitted:
            request = self._requests[entry.key]
            if request.saved is not None:
                self._recomputing.append(request)
            if not entry.preemptions:
                request.started, request.cached = now, entry.cached
        for chunk in step.prefill:
            self._enter(self._requests[chunk.entry.key], chunk.start, chunk.stop)
        if self._recomputing:
            self._resume()
        due, running = self._due[self.passes % self._around], len(self.scheduler.running)
        ended = 0
        for request in due:
            ended += request.told + 1 == len(request.depths)
        work = PassWork(self._rows, self._chunks, running, len(due), len(step.admitted), ended)
        seconds = self.seconds(work)
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
        place, page = self.passes % self._around, self.limits.page
        self.passes += 1
        self.rows_run += self._rows
        due, gone = self._due[place], self._leaving[place]
        if not due and not gone:
            return []
        self._due[place], self._leaving[place] = [], []
        fed: dict[int, tuple[int, int]] = {}
        complete: dict[int, int] = {}
        for rows in gone:
            self._rows -= rows.count
            self._chunks -= not rows.in_lane
            if rows.is_exact and not (rows.in_lane and rows.stop % page):
                key = _key(rows.request)
                complete[key] = max(complete.get(key, 0), rows.stop)
        ended = []
        for request in due:
            if not request.told:
                request.first = now
            request.told += 1
            if request.told < len(request.depths):
                position = request.prompt - 1 + request.told
                assert request.text is not None
                fed[_key(request)] = position, request.text[position]
                self._start_token(request, position, 0)
            else:
                request.ended = now
                ended.append(request)
        self.scheduler.update(StepOutput(fed, complete, [_key(request) for request in ended]))
        for request in ended:
            self._drop(request)
            del self._requests[_key(request)]
        return ended

    def _enter(self, request: Request, start: int, stop: int) -> None:
        """Positions of a prompt before loop 1, or those of a preempted request that are recomputed."""
        loops, saved = self.limits.loops, request.saved
        whole = stop if saved is None else min(saved)
        if saved is None and stop == request.prompt:
            # the last position of a prompt is the first that decodes
            whole -= 1
            self._start_token(request, whole, 0)
        whole = min(stop, whole)
        if whole > start:
            self._start_rows(_Rows(request, whole - start, whole, False, True), loops)
        for position in range(max(start, whole), stop) if saved is not None else ():
            # of those in flight as many loops as they had run
            if saved[position]:
                self._start_rows(_Rows(request, 1, position + 1, False, False), saved[position])

    def _start_token(self, request: Request, position: int, ran: int) -> None:
        """A token that decodes has run so many loops and runs the next one in the coming pass."""
        self._start_rows(_Rows(request, 1, position + 1, True, True), self.limits.loops - ran)
        if position == request.prompt - 1 + request.told:
            self._due[(self.passes + request.depths[request.told] - ran - 1) % self._around].append(request)

    def _start_rows(self, rows: _Rows, passes: int) -> None:
        self._leaving[(self.passes + passes - 1) % self._around].append(rows)
        self._rows += rows.count
        self._chunks += not rows.in_lane

    def _preempt(self, request: Request) -> None:
        saved = self._drop(request)
        # preempted again while it recomputes, it still has what was in flight before
        request.saved = saved or request.saved
        if request in self._recomputing:
            self._recomputing.remove(request)

    def _resume(self) -> None:
        """Puts the tokens of preempted requests in flight again once all positions before them are recomputed."""
        under_way = {_key(rows.request) for leaving in self._leaving for rows in leaving}
        for request in list(self._recomputing):
            entry, saved = request.entry, request.saved
            assert entry is not None and saved is not None
            if not entry.remaining and entry.key not in under_way:
                self._recomputing.remove(request)
                request.saved = None
                for position, ran in saved.items():
                    self._start_token(request, position, ran)

    def _drop(self, request: Request) -> dict[int, int]:
        """Takes the rows of a request away; the loops that those of its tokens had run, by position."""
        loops, ran = self.limits.loops, {}
        for ahead in range(self._around):
            place = (self.passes + ahead) % self._around
            mine = [rows for rows in self._leaving[place] if rows.request is request]
            if mine:
                self._leaving[place] = [rows for rows in self._leaving[place] if rows.request is not request]
            for rows in mine:
                self._rows -= rows.count
                self._chunks -= not rows.in_lane
                if rows.in_lane:
                    ran[rows.stop - 1] = loops - 1 - ahead
            if request in self._due[place]:
                self._due[place].remove(request)
        return ran


def _key(request: Request) -> int:
    assert request.entry is not None
    return request.entry.key
