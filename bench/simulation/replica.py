"""One simulated replica: an engine's passes counted row by row, with no model in it.

It keeps the books of `sigma0.serve.engine.engine` under `finish`: a pass runs one loop of every row there is. A new
token enters at loop 1 in the pass behind the one that told it, is told at its exit depth, and its row goes on to loop T
beside newer ones; prompts enter a stretch at a time, sharing what is left of `pass_rows` evenly. Full depth is the same
with every exit at T. Where pages run short, a text waits until there are pages for all of it; the engine begins it with
what its prompt needs and may put it back later. Not simulated: stretches found by another chat's text, requests that
are cancelled, `drop` and `verify`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReplicaLimits:
    """Of one replica, as `EngineLimits` has them.

    Attributes:
        loops: T.
        running: Requests that share passes at most.
        pass_rows: Rows that prompts may bring a pass up to.
        page: Columns of a page: a prefix is found in whole ones.
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
        least = {"loops": 1, "running": 1, "pass_rows": 1, "page": 1, "kept": 0, "waiting": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")

    @property
    def capacity(self) -> int:
        """Requests that run or wait at most."""
        return self.running + self.waiting


@dataclass(slots=True, eq=False)
class Request:
    """One text to be answered.

    Attributes:
        prompt: Columns of its prompt, at least 1.
        depths: Exit depth of each new token, at least one.
        kind: Of the traffic that it belongs to.
        session: Number of the chat that it is a turn of.
        number: In the order of arrival.
        arrived: Seconds.
        started: When it was admitted.
        first: When its first token was told.
        ended: When its last was.
        cached: Columns of the prompt that were found.
        told: Tokens so far.
        left: Columns of the prompt that are still to be read.
        refused: Whether it found everything full and went away.
        entered: Passes in which columns entered, and how many.
    """

    prompt: int
    depths: tuple[int, ...]
    kind: str = ""
    session: int = -1
    number: int = -1
    arrived: float = 0.0
    started: float = -1.0
    first: float = -1.0
    ended: float = -1.0
    cached: int = 0
    told: int = 0
    left: int = 0
    refused: bool = False
    entered: list[tuple[int, int]] = field(default_factory=list)


class Replica:
    """An engine without a model.

    Args:
        limits: What it may hold.
        seconds: Time of a pass, given its rows, the tokens that it tells and the requests that run.

    Attributes:
        passes: So far.
        rows_run: Rows in them.
        load: Requests that run or wait.
    """

    def __init__(self, limits: ReplicaLimits, seconds: Callable[[int, int, int], float]) -> None:
        self.limits = limits
        self.seconds = seconds
        self.passes = 0
        self.rows_run = 0
        self.load = 0
        self.waiting: deque[Request] = deque()
        self._busy = self._used = self._until = 0.0
        self._running = 0
        self._rows = 0
        self._reading: list[Request] = []
        self._fed: list[Request] = []
        # what happens at the end of a pass, by its number modulo T + 1; a row that enters in one leaves T - 1 later
        self._around = limits.loops + 1
        self._slots = limits.running
        self._due: list[list[Request]] = [[] for _ in range(self._around)]
        self._leaving = [0] * self._around
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._kept_columns = 0
        self._held_columns = 0

    def add(self, request: Request) -> None:
        """Queues a request."""
        assert request.prompt >= 1 and request.depths, "a request reads and writes at least one column"
        self.waiting.append(request)
        self.load += 1

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
        return self.load >= self.limits.capacity

    def begin_pass(self, now: float) -> float:
        """Lets rows enter; seconds that the pass will take."""
        if self.waiting and self._running < self._slots:
            self._admit(now)
        number, around = self.passes, self._around
        fed = self._fed
        if fed:
            for request in fed:
                request.entered.append((number, 1))
                self._due[(number + request.depths[request.told] - 1) % around].append(request)
            self._leaving[(number - 2) % around] += len(fed)
            self._rows += len(fed)
            self._fed = []
        if self._reading:
            self._rows += self._read(number, max(0, self.limits.pass_rows - self._rows))
        seconds = self.seconds(self._rows, len(self._due[number % around]), self._running)
        self._busy += seconds
        self._used += seconds * self._running
        self._until = now + seconds
        return seconds

    def used(self, now: float) -> tuple[float, float]:
        """Seconds in passes until now, and requests that ran, summed over those seconds."""
        left = max(0.0, self._until - now)
        return self._busy - left, self._used - left * self._running

    def end_pass(self, now: float) -> list[Request]:
        """Tells tokens and lets rows leave; the requests that are over."""
        place = self.passes % self._around
        self.passes += 1
        self.rows_run += self._rows
        self._rows -= self._leaving[place]
        self._leaving[place] = 0
        due = self._due[place]
        if not due:
            return []
        self._due[place] = []
        ended = []
        for request in due:
            if not request.told:
                request.first = now
            request.told += 1
            if request.told < len(request.depths):
                self._fed.append(request)
            else:
                request.ended = now
                self._end(request)
                ended.append(request)
        return ended

    def _admit(self, now: float) -> None:
        while self.waiting and self._running < self._slots:
            needs = self._columns_of(self.waiting[0])
            if self._running and self._held_columns + needs > self.limits.kept:
                return
            request = self.waiting.popleft()
            request.started = now
            # pages that are found belong to the text that runs now, and are not given up for others
            found = self._kept.pop(request.session, 0)
            self._kept_columns -= found
            self._held_columns += needs
            self._forget()
            # the last position of a prompt is always read: its loop states are needed
            request.cached = min(found, (request.prompt - 1) // self.limits.page * self.limits.page)
            request.left = request.prompt - request.cached
            self._running += 1
            self._reading.append(request)

    def _columns_of(self, request: Request) -> int:
        """Columns of the pages that a text has at its end; its last token never enters."""
        page = self.limits.page
        return -(-(request.prompt + len(request.depths) - 1) // page) * page

    def _read(self, number: int, room: int) -> int:
        """Lets stretches of prompts enter, as `Scheduler.stretches` does; the columns."""
        reading = self._reading[:room]
        total = 0
        for left, request in zip(range(len(reading), 0, -1), sorted(reading, key=_left), strict=True):
            count = min(request.left, -(-room // left))
            if not count:
                continue
            request.left -= count
            room -= count
            total += count
            self._leaving[(number - 2) % self._around] += count
            request.entered.append((number, count))
            if not request.left:
                self._due[(number + request.depths[0] - 1) % self._around].append(request)
        self._reading = [request for request in self._reading if request.left]
        return total

    def _end(self, request: Request) -> None:
        """Takes its rows away, and remembers the columns that are complete."""
        last, loops = self.passes - 1, self.limits.loops
        flying = 0
        for number, columns in reversed(request.entered):
            if number + loops - 1 <= last:
                break
            self._leaving[(number - 2) % self._around] -= columns
            flying += columns
        request.entered.clear()
        self._rows -= flying
        self._running -= 1
        self.load -= 1
        self._held_columns -= self._columns_of(request)
        if request.session >= 0:
            self.keep(request.session, request.prompt + len(request.depths) - 1 - flying)

    def keep(self, session: int, complete: int) -> None:
        """Remembers the whole pages of the complete columns of a chat, as far as there is room."""
        columns = complete // self.limits.page * self.limits.page
        self._kept_columns += columns - self._kept.pop(session, 0)
        self._kept[session] = columns
        self._forget()

    def _forget(self) -> None:
        """Gives remembered pages up until there is room for those of running texts; the last of the oldest first."""
        page = self.limits.page
        while self._kept and self._kept_columns + self._held_columns > self.limits.kept:
            over = self._kept_columns + self._held_columns - self.limits.kept
            session = next(iter(self._kept))
            gone = min(self._kept[session], -(-over // page) * page)
            self._kept[session] -= gone
            self._kept_columns -= gone
            if not self._kept[session]:
                del self._kept[session]


def _left(request: Request) -> int:
    return request.left
