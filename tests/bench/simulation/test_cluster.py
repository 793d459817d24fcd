"""The simulated cluster: nothing gets lost, the same seeds give the same, and requests go where they should."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.simulation.cluster import LONG, ROUTINGS, SHORT, Cluster, Crowd, LoadTable, Router, Traffic
from sigma0.bench.simulation.inputs import Kind, MeasuredAnswer
from sigma0.bench.simulation.replica import Replica, ReplicaLimits, Request
from sigma0.serve.cluster.router import NOTHING, EngineReport, Fleet
from sigma0.serve.engine.messages import Busy
from sigma0.serve.engine.scheduler import SequenceEntry

MEAN = 200


def exponential():
    """Services of an exponential law, as rows of prompts: its quantiles at even distances."""
    shares = (np.arange(4000) + 0.5) / 4000
    return np.maximum(1, np.round(-MEAN * np.log(1 - shares))).astype(int)


def servers(count, prompts, load, routing="random", seed="a", traffic=None, waiting=10**9):
    """Replicas that answer one request at a time, in as many seconds as it has rows over the mean."""
    mean = float(np.mean(prompts))
    # any text is one block, and none of it is ever found again
    limits = ReplicaLimits(1, running=1, pass_rows=10**9, page=10**9, kept=10**9, waiting=waiting)
    replicas = [Replica(limits, lambda work: work.rows / mean) for _ in range(count)]
    asked = traffic or Traffic(turns=1.0, think=0.0, context=10**9)
    answers = tuple(MeasuredAnswer(prompt=int(rows), depths=(1,)) for rows in prompts)
    crowd = Crowd(dict.fromkeys((SHORT, LONG), Kind(exit_config={}, answers=answers)), asked, load * count, seed)
    return Cluster(replicas, Router(routing, replicas, max(1, count // 2), seed), crowd)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ROUTINGS),
    st.integers(2, 5),
    st.floats(0.1, 1.5),
    st.floats(1, 4),
    st.floats(0, 3),
    st.integers(0, 100),
    st.sampled_from([0, 1, 3, 10**9]),
)
def test_littles_law(routing, count, load, turns, think, seed, waiting):
    """Requests in the system, integrated over time, are the seconds that each of them spent there: in any system."""
    traffic = Traffic(turns=turns, think=think, context=10**9)
    cluster = servers(count, [300, 1700], load, routing, str(seed), traffic, waiting)
    course = cluster.run(20, 100)
    inside = [request for request in cluster.asked if not request.refused]
    ended = [request.ended if request.ended >= 0 else cluster.now for request in inside]
    spent = sum(end - request.arrived for end, request in zip(ended, inside, strict=True))
    assert cluster.area == pytest.approx(spent, rel=1e-9, abs=1e-9)
    assert len(course.requests) == 100
    for request in course.requests:
        assert request.refused == (request.ended < 0), "what is measured is answered or refused, never left out"
        if request.refused:
            continue
        assert request.arrived <= request.started <= request.first <= request.ended <= cluster.now + 1e-9
    # what is answered is answered once, by one replica
    assert sum(replica.load for replica in cluster.replicas) + len(cluster._held) == cluster._inside
    assert sum(request.ended >= 0 for request in cluster.asked) == cluster.answered
    refused = sum(request.refused for request in cluster.asked)
    assert len(cluster.asked) == cluster.answered + refused + cluster._inside
    assert not refused or waiting < 10**9


@pytest.mark.slow
def test_the_rate_is_that_of_all_turns():
    """Chats that are there at the beginning make up for turns that come later."""
    for turns, think in ((1.0, 0.0), (4.0, 3.0), (3.0, 200.0)):
        traffic = Traffic(turns=turns, think=think, context=10**9)
        # far from full: later turns are longer, since no prefix is kept here
        cluster = servers(16, [MEAN], 0.05, "least-loaded", "b", traffic)
        course = cluster.run(500, 4000)
        arrived = [request.arrived for request in course.requests]
        assert len(arrived) / (arrived[-1] - arrived[0]) == pytest.approx(0.8, rel=0.1)


def test_what_comes_before_is_not_measured():
    course = servers(2, [MEAN], 0.5).run(30, 40)
    assert [request.number for request in course.requests] == list(range(30, 70))
    assert course.requests[0].arrived > 5.0


@pytest.mark.slow
def test_the_same_chats_come_under_every_routing():
    """What chats ask and when they begin does not depend on how fast they were answered, nor on the rate."""

    def chats(routing, load):
        traffic = Traffic(turns=3.0, think=1.0, context=10**9)
        cluster = servers(4, exponential(), load, routing, "a", traffic)
        cluster.run(0, 600)
        result = {}
        for request in cluster.asked:
            result.setdefault(request.session, []).append((request.kind, request.prompt, len(request.depths)))
        began = [result[2 * number] for number in range(1, 60)]
        return began, [next(r.arrived for r in cluster.asked if r.session == 2 * number) for number in range(1, 60)]

    every = {routing: chats(routing, 0.5) for routing in ROUTINGS}
    asked, began = every["random"]
    assert len({tuple(map(tuple, chat)) for chat in asked}) > 50
    for others, moments in every.values():
        assert moments == began
        # a chat may be further on at the end under one routing than under another
        assert all(one[: len(other)] == other[: len(one)] for one, other in zip(asked, others, strict=True))
    slower, moments = chats("random", 0.25)
    assert moments == pytest.approx([2 * moment for moment in began])
    assert all(one[: len(other)] == other[: len(one)] for one, other in zip(asked, slower, strict=True))


def test_the_same_seed_gives_the_same_course():
    def moments(seed):
        traffic = Traffic(turns=3.0, think=1.0)
        course = servers(4, exponential(), 0.7, "two-choices", seed, traffic).run(50, 500)
        return [(request.arrived, request.started, request.ended) for request in course.requests]

    assert moments("a") == moments("a") != moments("b")


def went(cluster, what):
    """By the number of each replica, something of every request that it was given."""
    result = {}
    for number, replica in enumerate(cluster.replicas):
        add = replica.add
        replica.add = lambda request, number=number, add=add: (
            result.setdefault(number, []).append(what(request)),
            add(request),
        )
    cluster.run(0, 500)
    return result


def test_all_turns_of_a_chat_go_to_one_replica():
    traffic = Traffic(turns=5.0, think=1.0, context=10**9)
    chats = went(servers(8, [MEAN], 0.5, "session-affine", "a", traffic), lambda request: request.session)
    assert len(chats) == 8 and sum(len(set(item)) for item in chats.values()) == len(set().union(*chats.values()))
    assert max(item.count(chat) for item in chats.values() for chat in item) > 3


def test_depth_aware_routing_keeps_both_kinds_apart():
    kinds = went(servers(6, [MEAN], 0.5, "depth-aware"), lambda request: request.kind)
    assert [set(kinds[number]) for number in range(6)] == [{SHORT}] * 3 + [{LONG}] * 3


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_the_least_are_those_that_a_search_finds(count, changes):
    table, loads = LoadTable(range(3, 3 + count)), dict.fromkeys(range(3, 3 + count), 0)
    for place, load in changes:
        number = 3 + place % count
        table.put(number, load)
        loads[number] = load
        assert table.least == min(loads.values())
        drawn = {table.one_of_least(Random(seed)) for seed in range(60)}
        assert drawn == {number for number, load in loads.items() if load == table.least}


@given(st.lists(st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 4)), max_size=80))
def test_the_fleet_is_the_one_that_serves(steps):
    """The same replica, or one with as few open requests where several are equal; then the real choice is taken on."""
    limits = ReplicaLimits(1, running=2, waiting=1)
    replicas = [Replica(limits, lambda work: 1.0) for _ in range(3)]
    router = Router("fleet", replicas, 0, "a")
    real = Fleet()
    real.update([EngineReport(str(number), 2, 3, NOTHING) for number in range(3)])
    at: list[tuple[str, SequenceEntry]] = []
    for what, chat in steps:
        if what == "give":
            if at:
                engine, entry = at.pop(0)
                real.give(engine)
                replicas[int(engine)].scheduler.remove(entry)
                router.note(int(engine), replicas[int(engine)].load)
            continue
        # a chat is known by how its prompts begin
        ids, request = [100 + chat] * 400, Request(400, (1,), "short", chat)
        number = router.choose(request)
        try:
            engine = real.take(ids)
        except Busy:
            assert replicas[number].scheduler.is_full
            continue
        assert replicas[number].load == replicas[int(engine)].load
        router._home[chat] = int(engine)
        replicas[int(engine)].add(request)
        at.append((engine, request.entry))
        router.note(int(engine), replicas[int(engine)].load)
