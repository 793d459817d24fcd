"""Which replica a request goes to.

A router knows a request's kind, since that is the exit setting that the request itself asks for; at which loops its
tokens will exit, it does not know. Those that choose by load know the requests open at every replica at that moment,
with no delay. A request whose replica is full is refused; `random`, `two-choices` and `session-affine` do not look for
another one, the others choose a full one only where all are.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from sigma0.bench.simulation.loads import LoadTable
from sigma0.bench.simulation.replica import Replica
from sigma0.bench.simulation.request import Request
from sigma0.bench.simulation.traffic import LONG, SHORT, Traffic


class Router(Protocol):
    """Chooses replicas."""

    def choose(self, request: Request) -> int | None:
        """The replica's number; None where the request is to wait at the router until one has room."""

    def note(self, number: int, load: int) -> None:
        """Is told of the requests that run or wait at a replica whenever they change."""


class _Blind:
    """Does not look at loads."""

    def note(self, number: int, load: int) -> None:
        """See `Router`."""


class Drawn(_Blind):
    """`random`: any of them.

    Args:
        replicas: To choose from.
        rng: Of the draws.
    """

    def __init__(self, replicas: Sequence[Replica], rng: Random) -> None:
        self._count, self._rng = len(replicas), rng

    def choose(self, request: Request) -> int:
        """See `Router`."""
        return self._rng.randrange(self._count)


class LessOfTwo(_Blind):
    """`two-choices`: of two drawn at random the one with fewer requests.

    Args:
        replicas: To choose from.
        rng: Of the draws.
    """

    def __init__(self, replicas: Sequence[Replica], rng: Random) -> None:
        self._replicas, self._rng = replicas, rng

    def choose(self, request: Request) -> int:
        """See `Router`."""
        count = len(self._replicas)
        first, second = self._rng.randrange(count), self._rng.randrange(count)
        return first if self._replicas[first].load <= self._replicas[second].load else second


class Affine(_Blind):
    """`session-affine`: every turn of a chat to the replica of its first, which is drawn.

    Args:
        replicas: To choose from.
        seed: Of the draw, as a hash of the chat would be.
    """

    def __init__(self, replicas: Sequence[Replica], seed: str) -> None:
        self._count, self._seed = len(replicas), seed

    def choose(self, request: Request) -> int:
        """See `Router`."""
        return Random(f"{self._seed}/{request.session}").randrange(self._count)


class Least:
    """`least-loaded`: one with the fewest requests, drawn where there are several.

    Args:
        replicas: All of them.
        rng: Of the draws.
        among: Numbers of those to choose from.
        holds: Whether requests wait at the router while none has room: `one-queue`.
    """

    def __init__(self, replicas: Sequence[Replica], rng: Random, among: Sequence[int], holds: bool = False) -> None:
        self._rng, self._holds = rng, holds
        self._running = replicas[among[0]].limits.running
        self._loads = LoadTable(among)

    def choose(self, request: Request) -> int | None:
        """See `Router`."""
        if self._holds and self._loads.least >= self._running:
            return None
        return self._loads.one_of_least(self._rng)

    def note(self, number: int, load: int) -> None:
        """See `Router`."""
        self._loads.put(number, load)


class Fleet:
    """`fleet`: as `sigma0.serve.cluster.router.Fleet` chooses.

    A chat goes back to the replica that read its last prompt as long as that one could begin it at once or has no more
    to do than the others; all else goes to one with the fewest requests. Where several have as few, the real one takes
    them in turn and this one draws.

    Args:
        replicas: All of them.
        rng: Of the draws.
        among: Numbers of those to choose from.
    """

    def __init__(self, replicas: Sequence[Replica], rng: Random, among: Sequence[int]) -> None:
        self._replicas, self._rng = replicas, rng
        self._loads = LoadTable(among)
        self._home: dict[int, int] = {}

    def choose(self, request: Request) -> int:
        """See `Router`."""
        home = self._home.get(request.session)
        if home is None or not (self._replicas[home].has_room or self._replicas[home].load == self._loads.least):
            home = self._loads.one_of_least(self._rng)
        self._home[request.session] = home
        return home

    def note(self, number: int, load: int) -> None:
        """See `Router`."""
        self._loads.put(number, load)


class Apart:
    """Traffic of short and of long depth on replicas of its own, with a router for each.

    Args:
        short: The router of the short traffic.
        long: That of the long traffic.
        first_long: Number of the first replica that takes long traffic.
    """

    def __init__(self, short: Router, long: Router, first_long: int) -> None:
        self._by_kind = {SHORT: short, LONG: long}
        self._first_long = first_long

    def choose(self, request: Request) -> int | None:
        """See `Router`."""
        return self._by_kind[request.kind].choose(request)

    def note(self, number: int, load: int) -> None:
        """See `Router`."""
        self._by_kind[SHORT if number < self._first_long else LONG].note(number, load)


# Routings that keep depths apart, and those that do the same with all traffic together: what to compare them with.
TOGETHER = {"depth-aware": "least-loaded", "fleet-depth-aware": "fleet"}
ROUTINGS = ("random", "two-choices", "least-loaded", "one-queue", "session-affine", "fleet", *TOGETHER)


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


def router_for(routing: str, replicas: Sequence[Replica], short: int, seed: str) -> Router:
    """The router of a name.

    Args:
        routing: One of `ROUTINGS`.
        replicas: To choose from, with nothing to do.
        short: How many of them the short traffic gets where depths are kept apart.
        seed: Of its draws.
    """
    rng, every = Random(f"routing/{seed}"), range(len(replicas))
    makers: dict[str, Callable[[], Router]] = {
        "random": lambda: Drawn(replicas, rng),
        "two-choices": lambda: LessOfTwo(replicas, rng),
        "least-loaded": lambda: Least(replicas, rng, every),
        "one-queue": lambda: Least(replicas, rng, every, holds=True),
        "session-affine": lambda: Affine(replicas, seed),
        "fleet": lambda: Fleet(replicas, rng, every),
        "depth-aware": lambda: Apart(Least(replicas, rng, every[:short]), Least(replicas, rng, every[short:]), short),
        "fleet-depth-aware": lambda: Apart(
            Fleet(replicas, rng, every[:short]), Fleet(replicas, rng, every[short:]), short
        ),
    }
    return makers[routing]()
