"""Which replica a request goes to.

A router knows a request's kind, since that is the exit setting that the request itself asks for; at which loops its
tokens will exit, it does not know. Those that choose by load know the requests open at every replica at that moment,
with no delay. A request whose replica is full is refused; `random`, `two-choices` and `session-affine` do not look for
another one, the others choose a full one only where all are.
"""

from collections.abc import Sequence
from random import Random

from sigma0.bench.simulation.replica import Replica, Request
from sigma0.bench.simulation.traffic import SHORT, Traffic

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
    """Chooses replicas.

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


def check_routing(routing: str, replicas: int, traffic: Traffic) -> None:
    """Refuses what cannot be simulated.

    Raises:
        ValueError: For an unknown name, or where there is nothing to keep apart.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"no such routing: {routing!r}; there are {', '.join(ROUTINGS)}")
    if routing in TOGETHER and (replicas < 2 or not 0 < traffic.short_share < 1):
        raise ValueError(
            f"{routing} divides at least two replicas between short and long traffic, got {replicas} in a group and "
            f"short_share {traffic.short_share:g}: leave it out of --routings, or change these"
        )
