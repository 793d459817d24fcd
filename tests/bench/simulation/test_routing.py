"""Routers: the table of loads beside a search through all of them, and `fleet` beside the one that serves."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.simulation.cluster import LoadTable, Router
from sigma0.bench.simulation.replica import Replica, ReplicaLimits, Request
from sigma0.serve.cluster.router import NOTHING, EngineReport, Fleet
from sigma0.serve.engine.messages import Busy
from sigma0.serve.engine.scheduler import SequenceEntry


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
