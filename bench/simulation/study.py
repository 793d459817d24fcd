"""One setting of the simulation: a fleet, a routing and a rate, and what users would see.

Fleets are cut into groups of replicas, each with a router of its own, and chats fall on groups at random. A Poisson
stream that is split at random gives independent Poisson streams, so groups know nothing of each other, and what holds
for one holds for a fleet of any number of them: some are simulated, not all. `random` and `session-affine` (which draws
a replica for each chat) would be the same without groups; the others know the load of their own group alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from sigma0.bench.rows_systems import Tail
from sigma0.bench.simulation.cluster import Cluster, Course
from sigma0.bench.simulation.inputs import Inputs, PassClock
from sigma0.bench.simulation.replica import Replica, Request
from sigma0.bench.simulation.routing import check_routing, router_for
from sigma0.bench.simulation.traffic import LONG, SHORT, Crowd, Traffic

# Requests before the measured ones, and measured ones of a group, for each replica.
WARM, EACH = 100, 300
SATURATED = 4000


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        routing: A name out of `ROUTINGS`.
        replicas: Of the fleet.
        rate: Requests a second for each replica.
        traffic: What is assumed of users.
        requests: To measure, over all groups.
        group: Replicas of a group.
        seed: Of all draws.
    """

    routing: str
    replicas: int
    rate: float
    traffic: Traffic
    requests: int
    group: int
    seed: int

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.group < 1 or self.requests < 1:
            raise ValueError("replicas, group and requests must be at least 1")
        if self.replicas % self.members:
            raise ValueError(
                f"{self.replicas} replicas do not divide into groups of {self.group}: choose another --group"
            )
        check_routing(self.routing, self.members, self.traffic)

    @property
    def members(self) -> int:
        """Replicas of each group: all, where they are fewer than a group may have."""
        return min(self.group, self.replicas)

    @property
    def groups(self) -> int:
        """Groups that are simulated, out of those that the fleet has."""
        return max(1, min(self.replicas // self.members, self.requests // (EACH * self.members)))


@dataclass(frozen=True)
class Seen:
    """What came of a setting.

    Attributes:
        queue_ms: From arrival to admission.
        first_token_ms: From arrival to first token.
        latency_ms: From arrival to last token.
        by_kind_ms: The same by kind of traffic.
        busy: Share of the time in which a replica ran a pass.
        slots: Share of the slots that was taken.
        rows_per_pass: Mean.
        cached: Share of prompt columns that were found in a replica's prefix cache.
        answered: Requests a second for each replica.
    """

    queue_ms: Tail
    first_token_ms: Tail
    latency_ms: Tail
    by_kind_ms: dict[str, Tail]
    busy: float
    slots: float
    rows_per_pass: float
    cached: float
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
        """Requests a second of one replica where some always wait and no prefix is found: all that it can answer."""
        if traffic not in self._most:
            replica = self.replica()
            crowd = Crowd(self.inputs.kinds, traffic, 1.0, Random("most"))
            chat = crowd.begin()
            now, ended = 0.0, 0
            while ended < SATURATED:
                while len(replica.waiting) < self.inputs.running:
                    request = crowd.turn(chat)
                    request.session = -1
                    replica.add(request)
                    chat = crowd.begin() if crowd.think(chat) is None else chat
                now += replica.begin_pass(now)
                ended += len(replica.end_pass(now))
            self._most[traffic] = ended / now
        return self._most[traffic]

    def replica(self) -> Replica:
        """An idle one."""
        return Replica(self.inputs.limits, self.clock)

    def group(self, setting: Setting, number: int) -> Cluster:
        """A group of a fleet, by its number."""
        seed = f"{setting.seed}/{setting.replicas}/{number}"
        replicas = [self.replica() for _ in range(setting.members)]
        short = self.short_replicas(setting) if setting.routing == "depth-aware" else 0
        # the same chats at every routing
        rng = Random(f"crowd/{seed}/{setting.rate}")
        crowd = Crowd(self.inputs.kinds, setting.traffic, setting.rate * setting.members, rng)
        return Cluster(replicas, router_for(setting.routing, replicas, short, seed), crowd)

    def short_replicas(self, setting: Setting) -> int:
        """Replicas of a group for the short traffic alone, so that both sides are equally near their limits."""
        share = setting.traffic.short_share
        only_short, only_long = (replace(setting.traffic, short_share=each) for each in (1.0, 0.0))
        short, long = share / self.most(only_short), (1 - share) / self.most(only_long)
        return min(max(round(setting.members * short / (short + long)), 1), setting.members - 1)


def simulate(fleets: Fleets, setting: Setting, advance: Callable[[int], None] = lambda done: None) -> Seen:
    """Simulates some groups of a fleet.

    Args:
        fleets: What replicas are like.
        setting: What is simulated.
        advance: Told how many requests are answered.
    """
    share = -(-setting.requests // setting.groups)
    courses = []
    for number in range(setting.groups):
        before = number * share
        cluster = fleets.group(setting, number)
        courses.append(cluster.run(WARM * setting.members, share, counted_from(before, advance)))
    return seen(courses, setting.members)


def counted_from(before: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Adds what was done before to what is told."""
    return lambda done: advance(before + done)


def seen(courses: Sequence[Course], members: int) -> Seen:
    """All groups together."""
    requests = [request for course in courses for request in course.requests]
    kinds = {kind: [each for each in requests if each.kind == kind] for kind in (SHORT, LONG)}
    prompts = sum(request.prompt for request in requests)
    return Seen(
        queue_ms=_tail([each.started - each.arrived for each in requests]),
        first_token_ms=_tail([each.first - each.arrived for each in requests]),
        latency_ms=latency(requests),
        by_kind_ms={kind: latency(found) for kind, found in kinds.items() if found},
        busy=_mean([course.busy for course in courses]),
        slots=_mean([course.slots for course in courses]),
        rows_per_pass=_mean([course.rows_per_pass for course in courses]),
        cached=sum(request.cached for request in requests) / prompts,
        answered=_mean([len(course.requests) / (course.seconds * members) for course in courses]),
    )


def latency(requests: Sequence[Request]) -> Tail:
    """From arrival to last token."""
    return _tail([each.ended - each.arrived for each in requests])


def _tail(seconds: Sequence[float]) -> Tail:
    p50, p95, p99 = (1000 * np.percentile(seconds, (50, 95, 99))).tolist()
    return Tail(p50=p50, p95=p95, p99=p99)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
