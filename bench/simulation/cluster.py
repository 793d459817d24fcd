"""A SIMULATION of replicas behind a router: events in the order of their times, and no model anywhere."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from sigma0.bench.simulation.replica import Replica
from sigma0.bench.simulation.request import Request
from sigma0.bench.simulation.routing import Router
from sigma0.bench.simulation.traffic import Chat, Crowd

_CHAT, _TURN, _PASS = range(3)


@dataclass(frozen=True)
class Totals:
    """Sums over all replicas from the beginning.

    Attributes:
        moment: When, seconds.
        busy: Seconds in passes.
        running: Requests that ran, summed over those seconds.
        answered: Requests.
        passes: How many.
        rows: Rows in them.
    """

    moment: float
    busy: float
    running: float
    answered: int
    passes: int
    rows: int


@dataclass(frozen=True)
class Course:
    """What happened.

    Attributes:
        requests: Those that were measured, in the order of their arrival, refused ones among them.
        seconds: From the first measured arrival until the last measured one was answered or refused.
        asked: Requests that came in that time.
        answered: Requests that were answered in it, whenever they came.
        busy: Share of that time in which a replica ran a pass.
        slots: Share of the replicas' slots that was taken, on average.
        rows_per_pass: Mean.
    """

    requests: tuple[Request, ...]
    seconds: float
    asked: int
    answered: int
    busy: float
    slots: float
    rows_per_pass: float


class Cluster:
    """Replicas, their router and the time.

    Args:
        replicas: At least one, idle.
        router: Chooses among them.
        crowd: Who asks.

    Attributes:
        now: Seconds since the beginning.
        asked: All requests so far, in the order of their arrival.
        area: Integral over time of the requests that have arrived and are not answered, seconds.
        answered: How many were answered.
        refused: How many were refused; their chats end.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, crowd: Crowd) -> None:
        self.replicas = replicas
        self.router = router
        self.crowd = crowd
        self.now = 0.0
        self.asked: list[Request] = []
        self.area = 0.0
        self.answered = self.refused = 0
        self._inside = 0
        self._events: list[tuple[float, int, int, Chat | int | None]] = []
        self._order = count()
        self._held: deque[Request] = deque()
        # as many as would wait at the replicas
        self._most_held = sum(replica.limits.waiting for replica in replicas)
        self._busy = [False] * len(replicas)
        self._chats: dict[int, Chat] = {}

    def run(self, warm: int, measured: int, advance: Callable[[int], None] = lambda done: None) -> Course:
        """Lets requests come until those that are measured have been answered or refused.

        Others go on coming to the end, so that the last ones are measured under the same load, and none of those that
        are measured is left out because it takes long.

        Args:
            warm: Requests before the measured ones, which only fill the replicas.
            measured: At least one.
            advance: Told how many of them are over.
        """
        for chat, seconds in self.crowd.under_way():
            self._chats[chat.number] = chat
            # its last turn went where one like it goes now
            number = self.router.choose(Request(1, (1,), chat.kind, chat.number))
            assert number is not None, "nobody waits before the first request"
            self.replicas[number].remember(chat.number, chat.columns)
            self._plan(seconds, _TURN, chat)
        self._plan(self.crowd.wait(), _CHAT, None)
        first: Totals | None = None
        over = 0
        while over < measured:
            done = self._step()
            if first is None and len(self.asked) > warm:
                first = self._totals()
            if done:
                over += sum(warm <= request.number < warm + measured for request in done)
                advance(over)
        assert first is not None
        return self._course(tuple(self.asked[warm : warm + measured]), first, self._totals())

    def _step(self) -> list[Request]:
        """The next event; the requests that are over with it."""
        moment, _, kind, what = heapq.heappop(self._events)
        self.area += self._inside * (moment - self.now)
        self.now = moment
        if kind == _PASS:
            assert isinstance(what, int)
            return self._pass_ends(what)
        if kind == _CHAT:
            self._plan(self.crowd.wait(), _CHAT, None)
            chat = self.crowd.begin()
            self._chats[chat.number] = chat
        else:
            assert isinstance(what, Chat)
            chat = what
        return self._arrives(self.crowd.turn(chat))

    def _plan(self, seconds: float, kind: int, what: Chat | int | None) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), kind, what))

    def _arrives(self, request: Request) -> list[Request]:
        """Gives a request to a replica or holds it; itself, if it is refused."""
        request.arrived, request.number = self.now, len(self.asked)
        self.asked.append(request)
        number = self.router.choose(request)
        if len(self._held) >= self._most_held if number is None else self.replicas[number].is_full:
            request.refused = True
            self.refused += 1
            del self._chats[request.session]
            return [request]
        self._inside += 1
        if number is None:
            self._held.append(request)
        else:
            self._give(number, request)
            self._begin_if_idle(number)
        return []

    def _give(self, number: int, request: Request) -> None:
        replica = self.replicas[number]
        replica.add(request)
        self.router.note(number, replica.load)

    def _begin_if_idle(self, number: int) -> None:
        if not self._busy[number] and self.replicas[number].has_work:
            self._busy[number] = True
            self._plan(self.replicas[number].begin_pass(self.now), _PASS, number)

    def _pass_ends(self, number: int) -> list[Request]:
        replica = self.replicas[number]
        ended = replica.end_pass(self.now)
        self._busy[number] = False
        if ended:
            self.router.note(number, replica.load)
        self._inside -= len(ended)
        self.answered += len(ended)
        for request in ended:
            chat = self._chats[request.session]
            seconds = self.crowd.think(chat)
            if seconds is None:
                del self._chats[request.session]
            else:
                self._plan(seconds, _TURN, chat)
        # all that there is room for enter the same pass
        for other in (*self._let_in(), number):
            self._begin_if_idle(other)
        return ended

    def _let_in(self) -> list[int]:
        """Gives requests that were held to replicas that have room now; these."""
        given = []
        while self._held:
            number = self.router.choose(self._held[0])
            if number is None:
                break
            self._give(number, self._held.popleft())
            given.append(number)
        return given

    def _totals(self) -> Totals:
        used = [replica.used(self.now) for replica in self.replicas]
        return Totals(
            self.now,
            sum(busy for busy, _ in used),
            sum(running for _, running in used),
            self.answered,
            sum(replica.passes for replica in self.replicas),
            sum(replica.rows_run for replica in self.replicas),
        )

    def _course(self, requests: tuple[Request, ...], first: Totals, last: Totals) -> Course:
        seconds = last.moment - first.moment
        places = sum(replica.limits.running for replica in self.replicas)
        return Course(
            requests,
            seconds,
            len(self.asked) - requests[0].number,
            last.answered - first.answered,
            (last.busy - first.busy) / (seconds * len(self.replicas)),
            (last.running - first.running) / (seconds * places),
            (last.rows - first.rows) / max(last.passes - first.passes, 1),
        )
