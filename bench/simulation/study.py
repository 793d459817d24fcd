"""One setting of the simulation: a fleet, a routing and a rate, and what users would see.

Fleets are cut into groups of replicas, each with a router of its own, and chats fall on groups at random. A Poisson
stream that is split at random gives independent Poisson streams, so groups know nothing of each other, and what holds
for one holds for a fleet of any number of them: each run simulates one group, never the whole of a larger fleet.
`session-affine` (which draws a replica for each chat) would be the same without groups. The others choose in their own
group alone: where they know loads, a router of more replicas would have more to choose from, and where they part chats
from their prefixes, it would part more of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sigma0.bench.core.conditions import git_commit, library_versions, utc_now
from sigma0.bench.core.rows import SIMULATION_SIZES, SimulationRow, Tail, row_key
from sigma0.bench.simulation.cluster import LONG, ROUTINGS, SHORT, TOGETHER, Cluster, Crowd, Router, Traffic
from sigma0.bench.simulation.inputs import Inputs, PassClock, percentiles, tail_of
from sigma0.bench.simulation.replica import Replica, Request
from sigma0.commands.options import check_known

# Answers of a replica that is never idle, from which its most is counted, and those before them.
SATURATED, BEFORE = 4000, 400


@dataclass(frozen=True)
class Setting:
    """What is simulated: a row's fields of the same names, but `group`, which is the most that a group may have."""

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
        check_known("routing", self.routing, ROUTINGS)
        share = self.traffic.short_share
        if self.routing in TOGETHER and (self.members < 2 or not 0 < share < 1):
            raise ValueError(
                f"{self.routing} divides at least two replicas between short and long traffic, got {self.members} in a "
                f"group and short_share {share:g}: leave it out of --routings, or change these"
            )

    @property
    def members(self) -> int:
        """Replicas of each group: all, where they are fewer than a group may have."""
        return min(self.group, self.replicas)

    @property
    def sizes(self) -> dict[str, Any]:
        """How much is simulated, by the names of a row."""
        named = {**vars(self), "group": self.members}
        return {name: named[name] for name in SIMULATION_SIZES}

    def key(self, digest: str) -> str:
        """That of its row, for inputs of this digest."""
        return row_key("simulation", digest, self.routing, *self.sizes.values(), self.rate, asdict(self.traffic))


class Fleets:
    """What all settings on one file of inputs share."""

    def __init__(self, inputs: Inputs, digest: str) -> None:
        self.inputs, self.digest = inputs, digest
        self.began = utc_now("seconds")
        versions = library_versions(("sigma0-lm", "numpy"))
        # of the inputs, with the code and the libraries that simulate
        self.conditions = inputs.conditions.model_copy(update={"commit": git_commit(), "versions": versions})
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
        limits = self.inputs.limits._replace(waiting=setting.waiting)
        replicas = [Replica(limits, self.clock) for _ in range(setting.members)]
        short = 0
        if setting.routing in TOGETHER:
            # so many that both sides are equally near their limits
            share = setting.traffic.short_share
            only_short, only_long = (replace(setting.traffic, short_share=item) for item in (1.0, 0.0))
            parts = share / self.most(only_short), (1 - share) / self.most(only_long)
            short = min(max(round(setting.members * parts[0] / sum(parts)), 1), setting.members - 1)
        crowd = Crowd(self.inputs.kinds, setting.traffic, setting.rate * setting.members, seed)
        return Cluster(replicas, Router(setting.routing, replicas, short, seed), crowd)


def simulate(fleets: Fleets, setting: Setting) -> SimulationRow:
    """Simulates some runs of a group of a fleet."""
    share, members, clock = setting.requests // setting.runs, setting.members, fleets.clock
    asked, beyond = clock.asked, clock.beyond
    courses = [fleets.group(setting, number).run(setting.warm * members, share) for number in range(setting.runs)]
    runs = [[request for request in course.requests if not request.refused] for course in courses]
    if min(map(len, runs)) < 2:
        raise ValueError("a run answered fewer than 2 requests: ask for more with --requests, or for fewer --runs")
    answered = [request for run in runs for request in run]
    latencies = _tails(runs, _latency)
    kinds = {kind: [[item for item in run if item.kind == kind] for run in runs] for kind in (SHORT, LONG)}
    by_kind = {kind: _tails(mine, _latency) for kind, mine in kinds.items() if all(mine)}
    worst = max(fleets.inputs.checks, key=lambda check: check.off, default=None)
    checks: dict[Literal["measured", "simulated"], Tail] = {}
    if worst is not None:
        checks = {"measured": tail_of(worst.measured), "simulated": tail_of(worst.simulated)}
    return SimulationRow(
        **fleets.conditions.model_dump(),
        **setting.sizes,
        time=fleets.began,
        inputs_sha256=fleets.digest,
        routing=setting.routing,
        rate=setting.rate,
        traffic=asdict(setting.traffic),
        queue_ms=_together(_tails(runs, lambda item: item.started - item.arrived)),
        first_token_ms=_together(_tails(runs, lambda item: item.first - item.arrived)),
        latency_ms=_together(latencies),
        by_kind_ms={kind: _together(tails) for kind, tails in by_kind.items()},
        latency_by_run_ms=latencies,
        by_kind_by_run_ms=by_kind,
        refused=1 - len(answered) / setting.requests,
        drift_by_run=tuple(map(_drift, runs)),
        busy=mean(course.busy for course in courses),
        slots=mean(course.slots for course in courses),
        rows_per_pass=mean(course.rows_per_pass for course in courses),
        beyond=(clock.beyond - beyond) / (clock.asked - asked),
        cached=sum(request.cached for request in answered) / sum(request.prompt for request in answered),
        asked=mean(course.asked / (course.seconds * members) for course in courses),
        answered=mean(course.answered / (course.seconds * members) for course in courses),
        check_ms=checks,
    )


def mean(values: Iterable[float]) -> float:
    """Of at least one."""
    every = list(values)
    return sum(every) / len(every)


def _latency(request: Request) -> float:
    return request.ended - request.arrived


def _drift(requests: Sequence[Request]) -> float:
    middle = len(requests) // 2
    return mean(map(_latency, requests[middle:])) / mean(map(_latency, requests[:middle]))


def _tails(runs: Sequence[Sequence[Request]], seconds: Callable[[Request], float]) -> tuple[Tail, ...]:
    return tuple(tail_of(percentiles([seconds(request) for request in run])) for run in runs)


def _together(tails: Sequence[Tail]) -> Tail:
    return tail_of([mean(item) for item in zip(*(tail.model_dump().values() for tail in tails), strict=True)])
