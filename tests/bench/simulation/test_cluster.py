"""The simulated cluster against queueing theory, which knows nothing of it."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.simulation.cluster import Cluster
from sigma0.bench.simulation.inputs import Kind, MeasuredAnswer
from sigma0.bench.simulation.replica import Replica, ReplicaLimits
from sigma0.bench.simulation.routing import ROUTINGS, check_routing, router_for
from sigma0.bench.simulation.traffic import LONG, SHORT, Crowd, Traffic

MEAN = 1000


def kinds_of(prompts):
    answers = tuple(MeasuredAnswer(prompt=int(rows), depths=(1,)) for rows in prompts)
    return {kind: Kind(exit_config={}, answers=answers) for kind in (SHORT, LONG)}


def exponential():
    """Services of an exponential law, as rows of prompts: its quantiles at even distances."""
    shares = (np.arange(4000) + 0.5) / 4000
    return np.maximum(1, np.round(-MEAN * np.log(1 - shares))).astype(int)


def servers(count, prompts, load, routing="random", seed="a", traffic=None):
    """Replicas that answer one request at a time, in as many seconds as it has rows over the mean."""
    mean = float(np.mean(prompts))
    limits = ReplicaLimits(1, running=1, pass_rows=10**9, page=1, kept=0)
    replicas = [Replica(limits, lambda rows, tokens, running: rows / mean) for _ in range(count)]
    asked = traffic or Traffic(turns=1.0, think=0.0, context=10**9)
    crowd = Crowd(kinds_of(prompts), asked, load * count, Random(seed))
    return Cluster(replicas, router_for(routing, replicas, max(1, count // 2), seed), crowd)


def waits(course):
    return np.array([request.started - request.arrived for request in course.requests])


def erlang_c(servers, load):
    """Probability that a request waits in M/M/c."""
    offered = servers * load
    free = sum(offered**busy / math.factorial(busy) for busy in range(servers))
    full = offered**servers / math.factorial(servers) / (1 - load)
    return full / (free + full)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_exponential_server_waits_as_m_m_1(load):
    course = servers(1, exponential(), load).run(1000, 40000)
    found = waits(course)
    assert found.mean() == pytest.approx(load / (1 - load), rel=0.1)
    assert course.busy == pytest.approx(load, rel=0.03)
    # the whole law: P(wait > t) = load exp(-(1 - load) t)
    for moment in (0.0, 1.0, 3.0):
        assert (found > moment).mean() == pytest.approx(load * math.exp(-(1 - load) * moment), abs=0.03)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_constant_server_waits_as_m_d_1(load):
    found = waits(servers(1, [MEAN], load).run(1000, 20000))
    assert found.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.1)


@pytest.mark.parametrize(("count", "load"), [(2, 0.6), (5, 0.8), (16, 0.9)])
def test_one_queue_before_several_servers_waits_as_m_m_c(count, load):
    found = waits(servers(count, exponential(), load, "one-queue").run(2000, 20000))
    chance = erlang_c(count, load)
    assert (found > 1e-9).mean() == pytest.approx(chance, abs=0.03)
    assert found.mean() == pytest.approx(chance / (count * (1 - load)), rel=0.15)


def test_random_routing_splits_a_poisson_stream_into_independent_ones():
    """Each of many servers is an M/M/1 of its own: so groups of a fleet need not be simulated together."""
    found = waits(servers(8, exponential(), 0.6).run(2000, 20000))
    assert found.mean() == pytest.approx(0.6 / 0.4, rel=0.1)


def test_a_router_that_knows_more_lets_wait_less():
    """As known: one queue, then the shortest queue, then the shorter of two, then any."""
    order = ("one-queue", "least-loaded", "two-choices", "random")
    found = [waits(servers(8, exponential(), 0.8, routing).run(1000, 10000)).mean() for routing in order]
    assert found == sorted(found) and found[0] < 0.9 * found[1] and found[1] < 0.5 * found[3]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ROUTINGS),
    st.integers(2, 5),
    st.floats(0.1, 1.5),
    st.floats(1, 4),
    st.floats(0, 3),
    st.integers(0, 100),
)
def test_littles_law(routing, count, load, turns, think, seed):
    """Requests in the system, integrated over time, are the seconds that each of them spent there: in any system."""
    traffic = Traffic(turns=turns, think=think, context=10**9)
    cluster = servers(count, [300, 1700], load, routing, str(seed), traffic)
    course = cluster.run(20, 100)
    ended = [request.ended if request.ended >= 0 else cluster.now for request in cluster.asked]
    spent = sum(end - request.arrived for end, request in zip(ended, cluster.asked, strict=True))
    assert cluster.area == pytest.approx(spent, rel=1e-9, abs=1e-9)
    assert len(course.requests) == 100
    for request in course.requests:
        assert request.arrived <= request.started <= request.first <= request.ended <= cluster.now + 1e-9
    # what is answered is answered once, by one replica
    assert sum(replica.load for replica in cluster.replicas) + len(cluster._held) == cluster._inside
    assert sum(request.ended >= 0 for request in cluster.asked) == len(cluster.asked) - cluster._inside


def test_the_rate_is_that_of_all_turns():
    """Chats that are there at the beginning make up for turns that come later."""
    for turns, think in ((1.0, 0.0), (4.0, 3.0), (3.0, 200.0)):
        traffic = Traffic(turns=turns, think=think, context=10**9)
        # far from full: later turns are longer, since no prefix is kept here
        cluster = servers(16, [MEAN], 0.05, "least-loaded", "b", traffic)
        course = cluster.run(500, 4000)
        arrived = [request.arrived for request in course.requests]
        assert len(arrived) / (arrived[-1] - arrived[0]) == pytest.approx(0.8, rel=0.1)


def test_the_same_seed_gives_the_same_course():
    def moments(seed):
        traffic = Traffic(turns=3.0, think=1.0)
        course = servers(4, exponential(), 0.7, "two-choices", seed, traffic).run(50, 500)
        return [(request.arrived, request.started, request.ended) for request in course.requests]

    assert moments("a") == moments("a") != moments("b")


def test_all_turns_of_a_chat_go_to_one_replica():
    cluster = servers(8, [MEAN], 0.5, "session-affine", "a", Traffic(turns=5.0, think=1.0, context=10**9))
    went = {}
    for number, replica in enumerate(cluster.replicas):
        add = replica.add
        replica.add = lambda request, number=number, add=add: (
            went.setdefault(request.session, []).append(number),
            add(request),
        )
    cluster.run(0, 500)
    assert all(len(set(numbers)) == 1 for numbers in went.values())
    assert max(map(len, went.values())) > 3 and len({numbers[0] for numbers in went.values()}) == 8


def test_depth_aware_routing_keeps_both_kinds_apart():
    cluster = servers(6, [MEAN], 0.5, "depth-aware")
    kinds = {}
    for number, replica in enumerate(cluster.replicas):
        add = replica.add
        replica.add = lambda request, number=number, add=add: (
            kinds.setdefault(number, set()).add(request.kind),
            add(request),
        )
    cluster.run(0, 500)
    assert kinds == {**{number: {SHORT} for number in range(3)}, **{number: {LONG} for number in range(3, 6)}}


def test_advance_is_told_of_every_measured_answer():
    told = []
    servers(2, [MEAN], 0.5).run(10, 50, told.append)
    assert told == sorted(told) and told[-1] == 50


@pytest.mark.parametrize(
    ("routing", "replicas", "share", "message"),
    [
        ("nearest", 4, 0.5, "no such routing: 'nearest'"),
        ("depth-aware", 1, 0.5, "at least two replicas"),
        ("depth-aware", 4, 1.0, "short and long traffic"),
    ],
)
def test_what_cannot_be_routed_is_refused(routing, replicas, share, message):
    with pytest.raises(ValueError, match=message):
        check_routing(routing, replicas, Traffic(short_share=share))


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0 requests"):
        Crowd(kinds_of([1]), Traffic(), 0.0, Random(0))
