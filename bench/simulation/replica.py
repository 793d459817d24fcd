"""One simulated replica: the engine's own scheduler, with a clock where the engine has a model.

A pass is `Scheduler.schedule`, a time by what the pass holds, and `Scheduler.feed` with made-up ids and measured
exits. Queue, slots, chunks of prompts, blocks, prefix cache and preemption are the scheduler's; rows in flight are
counted by `Flight`. Full depth is the same with every exit at T. Not simulated: cancelled requests, `drop`, `verify`
and coded K/V.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sigma0.serve.engine.block_pool import BlockPool
from sigma0.serve.engine.scheduler import Scheduler, SequenceEntry

# Ids of a chat count its positions; those of the next chat begin so much later.
_TEXT = 2**32


class ReplicaLimits(NamedTuple):
    """Of one replica, as `EngineLimits` has them."""

    loops: int  # T
    running: int = 16  # Requests that share passes at most
    pass_rows: int = 256  # Rows that prompts may bring a pass up to
    page: int = 16  # Columns of a block of K/V: a prefix is found in whole ones
    kept: int = 2**16  # Columns of K/V, for running texts and remembered ones together
    waiting: int = 64  # Requests in the queue at most, beside those that could run at once


class PassWork(NamedTuple):
    """What a pass holds: rows, chunks of prompts among them, requests that run, tokens that it tells.

    `begun` are the requests that it admits, `ended` those whose last token it tells.
    """

    rows: int
    chunks: int
    requests: int
    tokens: int
    begun: int
    ended: int


@dataclass(slots=True, eq=False)
class Request:
    """One text to be answered, and what became of it."""

    prompt: int  # Columns of its prompt, at least 1
    depths: tuple[int, ...]  # Exit depth of each new token, at least one
    kind: str = ""  # Of the traffic that it belongs to
    session: int = -1  # Number of the chat that it is a turn of
    # Ids of prompt and answer; empty for made-up ones, which turns of its chat alone begin with
    text: Sequence[int] = ()
    number: int = -1  # In the order of arrival
    arrived: float = 0.0  # Seconds
    started: float = -1.0  # When it was first admitted
    first: float = -1.0  # When its first token was told
    ended: float = -1.0  # When its last was
    cached: int = 0  # Columns of the prompt that were found
    told: int = 0  # Tokens so far
    refused: bool = False  # Whether it found everything full and went away
    entry: SequenceEntry = field(init=False)  # Its sequence in the scheduler, once it is queued
    # Loops of its tokens in flight when it was preempted, by position; None once they are in flight again
    saved: dict[int, int] | None = None


class _Rows(NamedTuple):
    """Rows of a request that leave together, up to a position `stop`.

    A token that decodes is `in_lane`, a chunk of the prompt is not; with exact ones the positions are complete in every
    plane.
    """

    request: Request
    number: int
    stop: int
    in_lane: bool
    is_exact: bool


class Flight:
    """Rows in flight, by the passes after which they leave, as `sigma0.decode.batch` has it under `finish`.

    Every row runs a loop in each pass. A token is told at its exit depth, and its row goes on to loop T. `rows` are in
    flight now, `chunks` of prompts among them; `passes` were run.
    """

    def __init__(self, loops: int, page: int) -> None:
        self._loops, self._page = loops, page
        self.rows = self.chunks = self.passes = 0
        # by the number of a pass modulo T + 1: a row that enters in one leaves with the one T - 1 later
        self._due: list[list[Request]] = [[] for _ in range(loops + 1)]
        self._leaving: list[list[_Rows]] = [[] for _ in range(loops + 1)]

    def _place(self, ahead: int = 0) -> int:
        return (self.passes + ahead) % len(self._due)

    @property
    def due(self) -> list[Request]:
        """Requests of which the coming pass tells a token."""
        return self._due[self._place()]

    def land(self) -> tuple[list[Request], dict[int, int]]:
        """Ends a pass.

        Returns:
            Requests of which it told a token, and leading positions that are exact in every plane now, by key.
        """
        place = self._place()
        self.passes += 1
        due, self._due[place] = self._due[place], []
        gone, self._leaving[place] = self._leaving[place], []
        complete: dict[int, int] = {}
        for rows in gone:
            self._count(rows, -1)
            # only whole blocks are registered, and no position is left out
            if rows.is_exact and not (rows.in_lane and rows.stop % self._page):
                key = rows.request.entry.key
                complete[key] = max(complete.get(key, 0), rows.stop)
        return due, complete

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Positions of a prompt before loop 1, or those of a preempted request that are recomputed."""
        saved = request.saved
        if saved is None:
            whole = stop
            if stop == request.prompt:
                # the last position of a prompt is the first that decodes
                whole -= 1
                self.enter_token(request, whole, 0)
        else:
            whole = min(stop, min(saved))
            for position in range(max(start, whole), stop):
                # of those in flight as many loops as they had run
                if saved[position]:
                    self._start(_Rows(request, 1, position + 1, False, False), saved[position])
        if whole > start:
            self._start(_Rows(request, whole - start, whole, False, True), self._loops)

    def enter_token(self, request: Request, position: int, ran: int) -> None:
        """A token that decodes, has run so many loops and runs the next one in the coming pass."""
        self._start(_Rows(request, 1, position + 1, True, True), self._loops - ran)
        if position == request.prompt - 1 + request.told:
            self._due[self._place(request.depths[request.told] - ran - 1)].append(request)

    def _start(self, rows: _Rows, passes: int) -> None:
        self._leaving[self._place(passes - 1)].append(rows)
        self._count(rows, 1)

    def _count(self, rows: _Rows, sign: int) -> None:
        self.rows += sign * rows.number
        self.chunks += sign * (not rows.in_lane)

    def has(self, request: Request) -> bool:
        """Whether it has rows in flight."""
        return any(rows.request is request for leaving in self._leaving for rows in leaving)

    def drop(self, request: Request) -> dict[int, int]:
        """Takes the rows of a request away; the loops that those of its tokens had run, by position."""
        ran: dict[int, int] = {}
        for ahead in range(len(self._due)):
            place = self._place(ahead)
            mine = [rows for rows in self._leaving[place] if rows.request is request]
            if mine:
                self._leaving[place] = [rows for rows in self._leaving[place] if rows.request is not request]
            for rows in mine:
                self._count(rows, -1)
                if rows.in_lane:
                    ran[rows.stop - 1] = self._loops - 1 - ahead
            if request in self._due[place]:
                self._due[place].remove(request)
        return ran


class Replica:
    """An engine without a model."""

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

    def add(self, request: Request) -> None:
        """Queues a request."""
        assert request.prompt >= 1 and request.depths, "a request reads and writes at least one column"
        length, key = request.prompt, next(self._keys)
        if not request.text:
            base = _TEXT * (request.session if request.session >= 0 else -1 - key)
            request.text = range(base, base + length + len(request.depths))
        request.entry = SequenceEntry(key, list(request.text[:length]), length, length - 1, window=self.limits.loops)
        self._requests[key] = request
        self.scheduler.add(request.entry)

    def remember(self, session: int, columns: int) -> None:
        """Leaves a chat in the prefix cache, as if its last turn had ended so many columns after its beginning."""
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
            request = requests[entry.key]
            # preempted again while it recomputes, it still has what was in flight before
            request.saved = flight.drop(request) or request.saved
            if request in self._recomputing:
                self._recomputing.remove(request)
        for entry in step.admitted:
            request = requests[entry.key]
            if request.saved is not None:
                self._recomputing.append(request)
            if not entry.preemptions:
                request.started, request.cached = now, entry.cached
        for entry, start, stop in step.prefill:
            flight.enter(requests[entry.key], start, stop)
        # tokens of preempted requests are in flight again once all positions before them are recomputed
        for request in list(self._recomputing):
            if not request.entry.remaining and not flight.has(request):
                assert request.saved is not None
                self._recomputing.remove(request)
                saved, request.saved = request.saved, None
                for position, ran in saved.items():
                    flight.enter_token(request, position, ran)
        due, running = flight.due, len(self.scheduler.running)
        ended = sum(request.told + 1 == len(request.depths) for request in due)
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
        ended: list[Request] = []
        for request in due:
            if not request.told:
                request.first = now
            request.told += 1
            if request.told == len(request.depths):
                request.ended = now
                ended.append(request)
                continue
            position = request.prompt - 1 + request.told
            self.scheduler.feed(request.entry, position, request.text[position])
            flight.enter_token(request, position, 0)
        for key, positions in complete.items():
            self.scheduler.register(self._requests[key].entry, positions)
        for request in ended:
            self.scheduler.remove(request.entry)
            flight.drop(request)
            del self._requests[request.entry.key]
        return ended
