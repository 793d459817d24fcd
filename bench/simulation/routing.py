"""Which replica a request goes to."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from sigma0.bench.simulation.replica import Replica, Request
from sigma0.bench.simulation.traffic import LONG, SHORT, Traffic


class Router(Protocol):
    """Chooses replicas."""

    def choose(self, request: Request) -> int | None:
        """The replica's number; None where the request is to wait at the router until one has room."""


class Drawn:
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


class LessOfTwo:
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


class Least:
    """`least-loaded`: one with the fewest requests, drawn where there are several.

    Args:
        replicas: All of them.
        rng: Of the draws.
        among: Numbers of those to choose from.
        holds: Whether requests wait at the router while none has room: `one-queue`.
    """

    def __init__(
        self, replicas: Sequence[Replica], rng: Random, among: Sequence[int] | None = None, holds: bool = False
    ) -> None:
        self._replicas, self._rng, self._holds = replicas, rng, holds
        self._among = range(len(replicas)) if among is None else among

    def choose(self, request: Request) -> int | None:
        """See `Router`."""
        replicas = self._replicas
        fewest = min(replicas[number].load for number in self._among)
        number = self._rng.choice([number for number in self._among if replicas[number].load == fewest])
        return None if self._holds and not replicas[number].has_room else number


class Affine:
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


class Apart:
    """`depth-aware`: traffic of short and of long depth on replicas of its own, least-loaded among them.

    Args:
        replicas: To divide, at least two.
        rng: Of the draws.
        short: How many take the short traffic.
    """

    def __init__(self, replicas: Sequence[Replica], rng: Random, short: int) -> None:
        assert 1 <= short < len(replicas)
        numbers = range(len(replicas))
        self._by_kind = {SHORT: Least(replicas, rng, numbers[:short]), LONG: Least(replicas, rng, numbers[short:])}

    def choose(self, request: Request) -> int | None:
        """See `Router`."""
        return self._by_kind[request.kind].choose(request)


ROUTINGS = ("random", "two-choices", "least-loaded", "one-queue", "session-affine", "depth-aware")


def check_routing(routing: str, replicas: int, traffic: Traffic) -> None:
    """Refuses what cannot be simulated.

    Raises:
        ValueError: For an unknown name, or where there is nothing to keep apart.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"no such routing: {routing!r}; there are {', '.join(ROUTINGS)}")
    if routing == "depth-aware" and (replicas < 2 or not 0 < traffic.short_share < 1):
        raise ValueError("depth-aware routing divides at least two replicas between short and long traffic")


def router_for(routing: str, replicas: Sequence[Replica], short: int, seed: str) -> Router:
    """The router of a name.

    Args:
        routing: One of `ROUTINGS`.
        replicas: To choose from.
        short: How many `depth-aware` gives to the short traffic.
        seed: Of its draws.
    """
    rng = Random(f"routing/{seed}")
    makers: dict[str, Callable[[], Router]] = {
        "random": lambda: Drawn(replicas, rng),
        "two-choices": lambda: LessOfTwo(replicas, rng),
        "least-loaded": lambda: Least(replicas, rng),
        "one-queue": lambda: Least(replicas, rng, holds=True),
        "session-affine": lambda: Affine(replicas, seed),
        "depth-aware": lambda: Apart(replicas, rng, short),
    }
    return makers[routing]()
