"""A SIMULATION of replicas after a router: events in the order of their times, and no model anywhere.

Who asks are chats that begin at random, each with some turns, drawn from measured answers. All of a chat is drawn when
it begins, by a generator of its own: so the same chats come under every routing, with the same turns at the same
moments but for the time that their earlier answers took.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.bench.simulation.inputs import Kind, MeasuredAnswer
from sigma0.bench.simulation.replica import Replica, Request

SHORT, LONG = "short", "long"


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Traffic:
    """What is assumed of users: none of it is measured."""

    # Share of chats whose tokens may stop early; the others are answered at full depth
    short_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    turns: Annotated[float, Field(ge=1)] = 3.0  # Mean turns of a chat, geometric
    think: Annotated[float, Field(ge=0)] = 5.0  # Mean seconds from an answer to the next turn, exponential
    context: Annotated[int, Field(ge=1)] = 2048  # Columns that a chat ends at


@dataclass(slots=True)
class Chat:
    """A chat under way, with the columns of all its turns so far.

    Of the turns to come, the next one last: what is asked, and the seconds from the answer before to it.
    """

    number: int
    kind: str
    columns: int
    turns: list[tuple[MeasuredAnswer, float]]


class Crowd:
    """Draws chats and their turns.

    It asks `rate` requests a second, turns counted; chats begin as a Poisson process.
    """

    def __init__(self, kinds: Mapping[str, Kind], traffic: Traffic, rate: float, seed: str) -> None:
        asked = {SHORT: traffic.short_share > 0, LONG: traffic.short_share < 1}
        missing = [kind for kind, is_asked in asked.items() if is_asked and kind not in kinds]
        if missing:
            raise ValueError(
                f"the inputs hold no answers of {missing[0]!r} traffic, only of {', '.join(kinds)}: "
                "measure them, or ask for none of it with short_share 0 or 1"
            )
        self.traffic = traffic
        self._kinds = kinds
        self._chats_per_second = rate / traffic.turns
        self._seed = seed
        self._begins = Random(f"{seed}/begins")
        self._count = 0

    def wait(self) -> float:
        """Seconds to the beginning of the next chat."""
        return self._begins.expovariate(1) / self._chats_per_second

    def begin(self) -> Chat:
        """The next chat."""
        self._count += 1
        return self._chat(2 * self._count, f"{self._seed}/{self._count}")

    def _chat(self, number: int, seed: str, has_begun: bool = False) -> Chat:
        """A chat with all its turns; if it has begun, one of them at least is over, and perhaps all are."""
        rng, traffic = Random(seed), self.traffic
        kind = SHORT if rng.random() < traffic.short_share else LONG
        answers = self._kinds[kind].answers
        chat, columns = Chat(number, kind, 0, []), 0
        over = int(has_begun)
        while has_begun and rng.random() * traffic.turns >= 1:
            over += 1
        while columns < traffic.context:
            answer = answers[rng.randrange(len(answers))]
            columns += answer.prompt + len(answer.depths)
            if over:
                over, chat.columns = over - 1, columns
                continue
            chat.turns.append((answer, rng.expovariate(1) * traffic.think))
            if rng.random() * traffic.turns < 1:
                break
        chat.turns.reverse()
        return chat

    def under_way(self) -> Iterator[tuple[Chat, float]]:
        """Chats that are between two turns before the first one begins, and the seconds to their next turn.

        Turns and thinking have no memory, so a chat that is found thinking has had a geometric number of turns and has
        as long to think as one that has just begun to: a crowd that has been there for ever, but for answers under way.
        """
        traffic, rng = self.traffic, Random(f"{self._seed}/under way")
        mean = self._chats_per_second * (traffic.turns - 1) * traffic.think
        # a Poisson number of them: as many as exponential steps of mean 1 fit into `mean`
        passed, number = rng.expovariate(1), 0
        while passed < mean:
            passed, number = passed + rng.expovariate(1), number + 1
            chat = self._chat(2 * number - 1, f"{self._seed}/under way/{number}", has_begun=True)
            if chat.turns:
                yield chat, chat.turns[-1][1]

    def turn(self, chat: Chat) -> Request:
        """Its next request: a measured prompt after all that was said before, answered with measured depths."""
        answer, _ = chat.turns.pop()
        request = Request(chat.columns + answer.prompt, answer.depths, chat.kind, chat.number)
        chat.columns += answer.prompt + len(answer.depths)
        return request


# Routings that keep depths apart, and those that do the same with all traffic together: what to compare them with.
TOGETHER = {"depth-aware": "least-loaded", "fleet-depth-aware": "fleet"}
ROUTINGS = ("random", "two-choices", "least-loaded", "one-queue", "session-affine", "fleet", *TOGETHER)


class LoadTable:
    """Numbers by their loads: the least is found among ten thousand as soon as among ten."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._by_load: list[list[int]] = [list(numbers)]
        self._place = {number: place for place, number in enumerate(numbers)}
        self._load = dict.fromkeys(numbers, 0)
        self.least = 0

    def one_of_least(self, rng: Random) -> int:
        """A number with the least load, drawn where there are several."""
        equal = self._by_load[self.least]
        return equal[int(rng.random() * len(equal))]

    def put(self, number: int, load: int) -> None:
        """Notes the load of a number."""
        before = self._by_load[self._load[number]]
        last, place = before.pop(), self._place[number]
        if last != number:
            before[place], self._place[last] = last, place
        while len(self._by_load) <= load:
            self._by_load.append([])
        self._place[number] = len(self._by_load[load])
        self._by_load[load].append(number)
        self._load[number] = load
        self.least = min(self.least, load)
        while not self._by_load[self.least]:
            self.least += 1


class Router:
    """Chooses which replica a request goes to.

    It knows a request's kind, since that is the exit setting that the request itself asks for; at which loops its
    tokens will exit, it does not know. Routings that choose by load know the requests open at every replica at that
    moment, with no delay. A request whose replica is full is refused; `random`, `two-choices` and `session-affine` do
    not look for another one, the others choose a full one only where all are.

    Where depths are kept apart, the first `short` of the replicas are the short traffic's.
    """

    def __init__(self, routing: str, replicas: Sequence[Replica], short: int, seed: str) -> None:
        self._routing = TOGETHER.get(routing, routing)
        self._replicas, self._seed, self._rng = replicas, seed, Random(f"routing/{seed}")
        every = range(len(replicas))
        self._first_long = short if routing in TOGETHER else 0
        self._long = LoadTable(every[self._first_long :])
        self._short = LoadTable(every[: self._first_long]) if routing in TOGETHER else self._long
        self._home: dict[int, int] = {}

    def note(self, number: int, load: int) -> None:
        """Is told of the requests that run or wait at a replica whenever they change."""
        (self._short if number < self._first_long else self._long).put(number, load)

    def choose(self, request: Request) -> int | None:
        """The replica's number; None where the request is to wait at the router until one has room.

        `fleet` is as `sigma0.serve.cluster.router.Fleet`: a chat goes back to the replica that read its last prompt as
        long as that one could begin it at once or has no more to do than the others; all else goes to one with the
        fewest requests. Where several have as few, the real one takes them in turn and this one draws.
        """
        replicas, loads, rng = self._replicas, self._short if request.kind == SHORT else self._long, self._rng
        if self._routing == "random":
            return rng.randrange(len(replicas))
        if self._routing == "session-affine":
            # as a hash of the chat would choose
            return Random(f"{self._seed}/{request.session}").randrange(len(replicas))
        if self._routing == "two-choices":
            first, second = rng.randrange(len(replicas)), rng.randrange(len(replicas))
            return first if replicas[first].load <= replicas[second].load else second
        if self._routing == "one-queue" and loads.least >= replicas[0].limits.running:
            return None
        if self._routing == "fleet":
            home = self._home.get(request.session)
            if home is None or replicas[home].load >= max(replicas[home].limits.running, loads.least + 1):
                home = loads.one_of_least(rng)
            self._home[request.session] = home
            return home
        return loads.one_of_least(rng)


class ClusterRun(NamedTuple):
    """What happened from the first measured arrival until the last measured request was over."""

    requests: tuple[Request, ...]  # Those that were measured, in the order of their arrival, refused ones among them
    seconds: float  # That it took
    asked: int  # Requests that came in that time
    answered: int  # Requests that were answered in it, whenever they came
    busy: float  # Share of that time in which a replica ran a pass
    slots: float  # Share of the replicas' slots that was taken, on average
    rows_per_pass: float  # Mean


class Cluster:
    """Replicas, their router and the time."""

    def __init__(self, replicas: Sequence[Replica], router: Router, crowd: Crowd) -> None:
        self.replicas = replicas
        self.router = router
        self.crowd = crowd
        self.now = 0.0
        self.asked: list[Request] = []
        # integral over time of the requests that have arrived and are not answered, seconds
        self.area = 0.0
        self.answered = self._inside = 0
        self._events: list[tuple[float, int, Callable[[], list[Request]]]] = []
        self._order = count()
        self._held: deque[Request] = deque()
        # as many as would wait at the replicas
        self._most_held = sum(replica.limits.waiting for replica in replicas)
        self._busy = [False] * len(replicas)
        self._chats: dict[int, Chat] = {}

    def run(self, warm: int, measured: int) -> ClusterRun:
        """Lets requests come until those that are measured have been answered or refused.

        Others go on coming to the end, so that the last ones are measured under the same load, and none of those that
        are measured is left out because it takes long.
        The `warm` requests before the measured ones only fill the replicas.
        """
        for chat, seconds in self.crowd.under_way():
            self._chats[chat.number] = chat
            # its last turn went where one like it goes now
            number = self.router.choose(Request(1, (1,), chat.kind, chat.number))
            assert number is not None, "nobody waits before the first request"
            self.replicas[number].remember(chat.number, chat.columns)
            self._plan(seconds, partial(self._arrives, chat))
        self._plan(self.crowd.wait(), self._begins)
        first: Sequence[float] = ()
        over = 0
        while over < measured:
            done = self._step()
            if not first and len(self.asked) > warm:
                first = self._totals()
            over += sum(warm <= request.number < warm + measured for request in done)
        seconds, busy, running, answered, passes, rows = (
            last - before for last, before in zip(self._totals(), first, strict=True)
        )
        return ClusterRun(
            tuple(self.asked[warm : warm + measured]),
            seconds,
            len(self.asked) - warm,
            int(answered),
            busy / (seconds * len(self.replicas)),
            running / (seconds * sum(replica.limits.running for replica in self.replicas)),
            rows / max(passes, 1),
        )

    def _step(self) -> list[Request]:
        """The next event; the requests that are over with it."""
        moment, _, event = heapq.heappop(self._events)
        self.area += self._inside * (moment - self.now)
        self.now = moment
        return event()

    def _plan(self, seconds: float, event: Callable[[], list[Request]]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _begins(self) -> list[Request]:
        self._plan(self.crowd.wait(), self._begins)
        chat = self.crowd.begin()
        self._chats[chat.number] = chat
        return self._arrives(chat)

    def _arrives(self, chat: Chat) -> list[Request]:
        """Gives a chat's next request to a replica or holds it; itself, if it is refused."""
        request = self.crowd.turn(chat)
        request.arrived, request.number = self.now, len(self.asked)
        self.asked.append(request)
        number = self.router.choose(request)
        if len(self._held) >= self._most_held if number is None else self.replicas[number].scheduler.is_full:
            request.refused = True
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
        if not self._busy[number] and self.replicas[number].load:
            self._busy[number] = True
            self._plan(self.replicas[number].begin_pass(self.now), partial(self._pass_ends, number))

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
            if chat.turns:
                self._plan(chat.turns[-1][1], partial(self._arrives, chat))
            else:
                del self._chats[request.session]
        # all that there is room for enter the same pass
        given = []
        while self._held and (other := self.router.choose(self._held[0])) is not None:
            self._give(other, self._held.popleft())
            given.append(other)
        for item in (*given, number):
            self._begin_if_idle(item)
        return ended

    def _totals(self) -> Sequence[float]:
        """Seconds, seconds in passes, requests that ran over those, answers, passes and rows of all replicas so far."""
        used = [replica.used(self.now) for replica in self.replicas]
        return (
            self.now,
            sum(busy for busy, _ in used),
            sum(running for _, running in used),
            self.answered,
            sum(replica.passes for replica in self.replicas),
            sum(replica.rows_run for replica in self.replicas),
        )
