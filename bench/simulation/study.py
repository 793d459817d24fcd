"""One setting of the simulation: a fleet, a routing and a rate, and what users would see.

Fleets are cut into groups of replicas, each with a router of its own, and chats fall on groups at random. A Poisson
stream that is split at random gives independent Poisson streams, so groups know nothing of each other, and what holds
for one holds for a fleet of any number of them: each run simulates one group, never the whole of a larger fleet.
`session-affine` (which draws a replica for each chat) would be the same without groups. The others choose in their own
group alone: where they know loads, a router of more replicas would have more to choose from, and where they part chats
from their prefixes, it would part more of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sigma0.bench.core.rows_systems import Tail
from sigma0.bench.simulation.cluster import Cluster, Course
from sigma0.bench.simulation.inputs import Inputs, PassClock
from sigma0.bench.simulation.replica import Replica
from sigma0.bench.simulation.request import Request
from sigma0.bench.simulation.routing import TOGETHER, check_routing, router_for
from sigma0.bench.simulation.spread import mean
from sigma0.bench.simulation.traffic import LONG, SHORT, Crowd, Traffic

# Answers of a replica that is never idle, from which its most is counted, and those before them.
SATURATED, BEFORE = 4000, 400


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        routing: A name out of `ROUTINGS`.
        replicas: Of the fleet.
        rate: Requests a second for each replica.
        traffic: What is assumed of users.
        requests: To measure, over all runs.
        group: Replicas of a group at most.
        seed: Of all draws.
        runs: Independent ones, of a group each.
        warm: Requests for each replica before the measured ones.
        waiting: Requests that wait at a replica at most.

    Raises:
        ValueError: For what is too small, does not divide, or cannot be simulated.
    """

    routing: str
    replicas: int
    rate: float
    traffic: Traffic
    requests: int = 3000
    group: int = 32
    seed: int = 0
    runs: int = 5
    warm: int = 100
    waiting: int = 64

    def __post_init__(self) -> None:
        for name, least in {"replicas": 1, "group": 1, "requests": 1, "runs": 1, "warm": 0, "waiting": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.replicas % self.members:
            raise ValueError(
                f"{self.replicas} replicas do not divide into groups of {self.group}: choose another --group"
            )
        if self.requests % self.runs:
            raise ValueError(f"{self.requests} requests do not divide into {self.runs} runs: choose a multiple")
        check_routing(self.routing, self.members, self.traffic)

    @property
    def members(self) -> int:
        """Replicas of each group: all, where they are fewer than a group may have."""
        return min(self.group, self.replicas)


@dataclass(frozen=True)
class Seen:
    """What came of a setting, as `SimulationRow` has it.

    Attributes:
        queue_ms: From arrival to admission, of answered requests, as are all times.
        first_token_ms: From arrival to first token.
        latency_ms: From arrival to last token.
        by_kind_ms: The same by kind of traffic.
        latency_by_run_ms: Of each run.
        by_kind_by_run_ms: Of each run.
        refused: Share of the requests.
        drift_by_run: Mean latency of the later half of a run's requests over that of the earlier.
        busy: Share of the time in which a replica ran a pass.
        slots: Share of the slots that was taken.
        rows_per_pass: Mean.
        beyond: Share of the passes with more rows than any that was measured.
        cached: Share of prompt columns that were found in a replica's prefix cache.
        asked: Requests a second for each replica that came: fewer than `rate` where chats are refused and end, or turns
            come later because answers do.
        answered: Requests a second for each replica.
    """

    queue_ms: Tail
    first_token_ms: Tail
    latency_ms: Tail
    by_kind_ms: dict[str, Tail]
    latency_by_run_ms: tuple[Tail, ...]
    by_kind_by_run_ms: dict[str, tuple[Tail, ...]]
    refused: float
    drift_by_run: tuple[float, ...]
    busy: float
    slots: float
    rows_per_pass: float
    beyond: float
    cached: float
    asked: float
    answered: float


class Fleets:
    """What all settings on one file of inputs share.

    Args:
        inputs: Measured pass times and depths.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.clock = PassClock(inputs.pass_times)
        self._most: dict[Traffic, float] = {}

    def most(self, traffic: Traffic) -> float:
        """Requests a second of one replica that always has chats enough, each of which asks on at once.

        It finds every prefix that it has room for, so a routing that parts chats from their prefixes answers fewer.
        """
        if traffic not in self._most:
            replica = Replica(self.inputs.limits, self.clock)
            crowd = Crowd(self.inputs.kinds, traffic, 1.0, "most")
            chats = {chat.number: chat for chat in (crowd.begin() for _ in range(2 * self.inputs.running))}
            for chat in chats.values():
                replica.add(crowd.turn(chat))
            now, began, ended = 0.0, 0.0, 0
            while ended < BEFORE + SATURATED:
                now += replica.begin_pass(now)
                for request in replica.end_pass(now):
                    ended += 1
                    began = now if ended == BEFORE else began
                    chat = chats.pop(request.session)
                    chat = chat if chat.turns else crowd.begin()
                    chats[chat.number] = chat
                    replica.add(crowd.turn(chat))
            self._most[traffic] = SATURATED / (now - began)
        return self._most[traffic]

    def group(self, setting: Setting, number: int) -> Cluster:
        """The group of a run, by the run's number."""
        # not of the routing, nor of the rate: all of them are asked by the same chats
        seed = f"{setting.seed}/{setting.replicas}/{number}"
        limits = replace(self.inputs.limits, waiting=setting.waiting)
        replicas = [Replica(limits, self.clock) for _ in range(setting.members)]
        short = self.short_replicas(setting) if setting.routing in TOGETHER else 0
        crowd = Crowd(self.inputs.kinds, setting.traffic, setting.rate * setting.members, seed)
        return Cluster(replicas, router_for(setting.routing, replicas, short, seed), crowd)

    def short_replicas(self, setting: Setting) -> int:
        """Replicas of a group for the short traffic alone, so that both sides are equally near their limits."""
        share = setting.traffic.short_share
        only_short, only_long = (replace(setting.traffic, short_share=each) for each in (1.0, 0.0))
        short, long = share / self.most(only_short), (1 - share) / self.most(only_long)
        return min(max(round(setting.members * short / (short + long)), 1), setting.members - 1)


def simulate(fleets: Fleets, setting: Setting, advance: Callable[[int], None] = lambda done: None) -> Seen:
    """Simulates some runs of a group of a fleet.

    Args:
        fleets: What replicas are like.
        setting: What is simulated.
        advance: Told how many requests are over.

    Raises:
        ValueError: If a run answers too few requests to tell anything.
    """
    share = setting.requests // setting.runs
    asked, beyond = fleets.clock.asked, fleets.clock.beyond
    courses = []
    for number in range(setting.runs):
        cluster = fleets.group(setting, number)
        courses.append(cluster.run(setting.warm * setting.members, share, counted_from(number * share, advance)))
    return seen(courses, setting.members, (fleets.clock.beyond - beyond) / (fleets.clock.asked - asked))


def counted_from(before: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Adds what was done before to what is told."""
    return lambda done: advance(before + done)


def seen(courses: Sequence[Course], members: int, beyond: float) -> Seen:
    """All runs together."""
    runs = [[request for request in course.requests if not request.refused] for course in courses]
    asked = sum(len(course.requests) for course in courses)
    if min(map(len, runs)) < 2:
        raise ValueError("a run answered fewer than 2 requests: ask for more with --requests, or for fewer --runs")
    latencies = tuple(_latency(run) for run in runs)
    kinds = {
        kind: tuple(_latency(mine) for run in runs if (mine := [each for each in run if each.kind == kind]))
        for kind in (SHORT, LONG)
    }
    told = {kind: tails for kind, tails in kinds.items() if len(tails) == len(runs)}
    answered = [request for run in runs for request in run]
    return Seen(
        queue_ms=_together([_tail([each.started - each.arrived for each in run]) for run in runs]),
        first_token_ms=_together([_tail([each.first - each.arrived for each in run]) for run in runs]),
        latency_ms=_together(latencies),
        by_kind_ms={kind: _together(tails) for kind, tails in told.items()},
        latency_by_run_ms=latencies,
        by_kind_by_run_ms=told,
        refused=1 - len(answered) / asked,
        drift_by_run=tuple(map(drift, runs)),
        busy=mean([course.busy for course in courses]),
        slots=mean([course.slots for course in courses]),
        rows_per_pass=mean([course.rows_per_pass for course in courses]),
        beyond=beyond,
        cached=sum(request.cached for request in answered) / sum(request.prompt for request in answered),
        asked=mean([course.asked / (course.seconds * members) for course in courses]),
        answered=mean([course.answered / (course.seconds * members) for course in courses]),
    )


def drift(requests: Sequence[Request]) -> float:
    """Mean latency of the later half over that of the earlier."""
    seconds = [each.ended - each.arrived for each in requests]
    middle = len(seconds) // 2
    return mean(seconds[middle:]) / mean(seconds[:middle])


def _latency(requests: Sequence[Request]) -> Tail:
    return _tail([each.ended - each.arrived for each in requests])


def _tail(seconds: Sequence[float]) -> Tail:
    p50, p95, p99 = (1000 * np.percentile(seconds, (50, 95, 99))).tolist()
    return Tail(p50=p50, p95=p95, p99=p99)


def _together(tails: Sequence[Tail]) -> Tail:
    return Tail(**{name: mean([getattr(tail, name) for tail in tails]) for name in ("p50", "p95", "p99")})
