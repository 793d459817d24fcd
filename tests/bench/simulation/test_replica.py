"""The simulated replica keeps the very books of the real engine: the same passes, rows and moments for every token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.bench.simulation.replica import Replica, ReplicaLimits, Request
from sigma0.decode.kv_store import BlockShape
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import Busy, EngineLimits, EngineRequest, RequestOutput, TokenOutput

LOOPS = 4
CONFIGS = (ExitConfig(q=0.5), ExitConfig(q=0.9), ExitConfig(mode="full"), ExitConfig(mode="margin", theta=0.3))


def engine_of(model, running, pass_rows, blocks):
    kept = blocks * BlockShape.of(model[0], 4).bytes_with(model[0].dtype)
    return Engine(*model, "tiny", EngineLimits(running, 64, pass_rows, 4, kept), watch=False)


def played(engine, jobs):
    """Ends and moments of every job's tokens, rows of every pass; a job is submitted before its own pass."""
    queue, keys, output, ends, rows = sorted(jobs, key=lambda item: item[0]), {}, {}, {}, []
    for number in range(2000):
        while queue and queue[0][0] <= number:
            keys[engine.submit(queue[0][1])] = len(keys)
            queue.pop(0)
        if not engine.has_work and not queue:
            return output, ends, rows
        before = engine.status().rows
        for key, event in engine.step():
            if isinstance(event, TokenOutput):
                output.setdefault(keys[key], []).append(number)
            else:
                assert isinstance(event, RequestOutput)
                ends[keys[key]] = event
        rows.append(engine.status().rows - before)
    raise AssertionError("the engine does not end")


def simulated(limits, requests):
    """Moments of the first and last token of every request, and rows of every pass; time is counted in passes."""
    queue, rows, ended = sorted(requests, key=lambda item: item[0]), [], []
    replica = Replica(limits, lambda work: rows.append(work.rows) or 1.0)
    for number in range(2000):
        while queue and queue[0][0] <= number:
            replica.add(queue.pop(0)[1])
        if not replica.load:
            if not queue:
                assert replica.rows_run == sum(rows)
                return ended, rows
            rows.append(0)
            continue
        replica.begin_pass(number)
        ended += replica.end_pass(number)
        # an idle pass is none of the replica's
    raise AssertionError("the replica does not end")


@st.composite
def loads(draw):
    jobs = []
    for number in range(draw(st.integers(1, 7))):
        # some texts begin alike
        first, more = 10 + draw(st.integers(0, number)), draw(st.integers(0, 30))
        ids = (first, *np.random.default_rng(0).integers(40, 90, more).tolist())
        job = EngineRequest(ids, draw(st.integers(1, 12)), draw(st.sampled_from(CONFIGS)))
        jobs.append((draw(st.integers(0, 25)), job))
    return jobs


def beside_the_engine(model, jobs, running, pass_rows, blocks):
    jobs = sorted(jobs, key=lambda item: item[0])
    output, ends, real_rows = played(engine_of(model, running, pass_rows, blocks), jobs)
    requests = []
    for number, (at, job) in enumerate(jobs):
        tokens = ends[number].tokens
        text = (*job.prompt_ids, *(token.id for token in tokens))
        requests.append((at, Request(len(job.prompt_ids), tuple(token.depth for token in tokens), text=text)))
    ended, rows = simulated(ReplicaLimits(LOOPS, running, pass_rows, 4, 4 * blocks), requests)
    assert len(ended) == len(jobs)
    assert rows == real_rows
    for number, (_, request) in enumerate(requests):
        assert (request.first, request.ended) == (output[number][0], output[number][-1])
        assert (request.entry.preemptions, request.cached) == (ends[number].preemptions, ends[number].cached_tokens)
    return sum(end.preemptions for end in ends.values())


@settings(max_examples=20, deadline=None)
@given(loads(), st.integers(1, 4), st.integers(1, 40), st.integers(11, 40))
def test_every_token_is_told_in_the_same_pass(model, jobs, running, pass_rows, blocks):
    """Also where blocks run out, and prompts begin with what others have left."""
    beside_the_engine(model, jobs, running, pass_rows, blocks)


def test_requests_are_preempted_and_resumed_as_in_the_engine(model):
    preempted = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        jobs = [
            (int(rng.integers(0, 9)), EngineRequest((10 + number, *range(20, 20 + length)), 12, CONFIGS[number % 4]))
            for number, length in enumerate(rng.integers(0, 30, 6).tolist())
        ]
        preempted += beside_the_engine(model, jobs, 4, int(rng.integers(2, 40)), 12 + seed)
    assert preempted > 5, "blocks must run out"


def answered(replica, request):
    replica.add(request)
    while replica.load:
        replica.begin_pass(0.0)
        replica.end_pass(0.0)
    return request


def test_a_turn_finds_what_the_turn_before_it_left(model):
    """A chat that goes on reads only what is new; so does the simulated one, to the column."""
    engine, ids, cached = engine_of(model, 2, 64, 500), list(range(20, 41)), []
    replica = Replica(ReplicaLimits(LOOPS, 2, 64, 4), lambda work: 1.0)
    for _ in range(4):
        _, ends, _ = played(engine, [(0, EngineRequest(tuple(ids), 6, ExitConfig(q=0.5)))])
        tokens = ends[0].tokens
        request = answered(replica, Request(len(ids), tuple(token.depth for token in tokens), session=1))
        cached.append((ends[0].cached_tokens, request.cached))
        ids += [token.id for token in tokens] + [50, 51, 52]
    assert all(real == simulated for real, simulated in cached)
    assert cached[0] == (0, 0) and cached[-1][0] > 30
    assert replica.passes == engine.status().passes and replica.rows_run == engine.status().rows


def test_a_chat_that_was_there_before_is_found():
    replica = Replica(ReplicaLimits(1, 2, 64, 4, kept=40), lambda work: 1.0)
    replica.remember(1, 21)
    replica.remember(2, 10)
    asked = [Request(30, (1,), session=1), Request(3, (1,), session=2)]
    assert [answered(replica, request).cached for request in asked] == [20, 0]
    replica.remember(3, 41)
    assert answered(replica, Request(30, (1,), session=3)).cached == 0, "it did not fit"


def test_a_replica_is_full_with_as_many_as_the_engine_takes(model):
    engine = Engine(*model, "tiny", EngineLimits(2, 3, 64, 4, 2**22), watch=False)
    replica = Replica(ReplicaLimits(LOOPS, 2, 64, 4, waiting=3), lambda work: 1.0)
    job = EngineRequest((20, 5), 3, ExitConfig(mode="full"))
    for _ in range(5):
        assert not replica.scheduler.is_full
        engine.submit(job)
        replica.add(Request(2, (LOOPS,) * 3))
    for _ in range(2):
        assert replica.scheduler.is_full
        with pytest.raises(Busy):
            engine.submit(job)
        engine.step()
        replica.begin_pass(0.0)
