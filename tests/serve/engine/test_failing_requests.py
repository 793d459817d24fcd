"""What breaks inside of one request fails that one alone, and what breaks in a step leaves nothing after."""

# ruff: noqa: F401, F811  (fixtures are imported by name)

from unittest import mock

import numpy as np
import pytest

from sigma0 import ExitConfig
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestFailed, RequestOutput
from sigma0.signals.canary import Tighten
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import (
    CONFIGS,
    FULL,
    POSITION_BYTES,
    alone,
    ask,
    drain,
    job,
    model,
    outcome,
    poisoned,
)


def test_numbers_that_are_none_fail_one_request_alone(model, pocket):
    """A request whose states are no numbers ends; the blocks it wrote do no harm to the next."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 4, 64, 4, POSITION_BYTES * 4 * 10), watch=True)
    with poisoned(model, 60):
        good, bad = engine.submit(job(9, 8)), engine.submit(EngineRequest((5, 60, 7, 8, 9), 8, ExitConfig(q=0.5)))
        result = drain(engine)
        afterwards = ask(engine, job(9, 8))
    assert isinstance(result[bad][-1], RequestFailed) and len(result[bad]) == 1
    assert outcome(result[good]) == outcome(alone(model, pocket[1], job(9, 8))) == outcome(afterwards)


def test_numbers_that_are_none_are_not_seen_by_shorter_texts(model, pocket):
    """A row of few blocks is padded up to those of the longest: not with blocks of another request."""
    engine = Engine(model, pocket[1], "tiny", EngineLimits(4, 8, 64, 4, KV), watch=True)
    with poisoned(model, 60):
        bad = engine.submit(EngineRequest((5, 60, 7, 8, 9), 8, FULL))
        long, short = engine.submit(job(9, 12)), engine.submit(job(2, 12, 2))
        result = drain(engine)
    assert isinstance(result[bad][-1], RequestFailed)
    assert outcome(result[long]) == outcome(alone(model, pocket[1], job(9, 12)))
    assert outcome(result[short]) == outcome(alone(model, pocket[1], job(2, 12, 2)))


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_numbers_that_are_none_stay_with_a_request_that_is_cancelled(model, pocket, passes):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(1, 4, 64, 4, POSITION_BYTES * 4 * 3), watch=True)
    with poisoned(model, 60):
        bad = engine.submit(EngineRequest((5, 7, 8, 60, 60, 60), 2, FULL))
        for _ in range(passes):
            engine.step()
        engine.cancel(bad)
        asked = job(1, 7, 4)
        result = ask(engine, asked)
    assert outcome(result) == outcome(alone(model, pocket[1], asked))


def test_a_failure_leaves_the_prefix_that_others_share(model, pocket):
    engine = Engine(model, pocket[1], "tiny", EngineLimits(page_size=4, kv_bytes=KV), watch=True)
    shared = tuple(np.random.default_rng(1).integers(5, 59, 12).tolist())
    good = EngineRequest((*shared, 7, 8, 9), 16, FULL)
    with poisoned(model, 60):
        key = engine.submit(good)
        result = [event for _ in range(8) for _, event in engine.step()]
        bad = engine.submit(EngineRequest((*shared, 60), 4, FULL))
        rest = drain(engine)
    assert isinstance(rest[bad][-1], RequestFailed)
    expected = outcome(alone(model, pocket[1], good))
    assert outcome([*result, *rest[key]]) == outcome(ask(engine, good)) == expected


def test_a_crash_inside_one_request_fails_that_one_alone(model, pocket, monkeypatch):
    engine = Engine(model, pocket[1], "tiny", watch=True)
    good, bad = engine.submit(job(5, 6)), engine.submit(job(5, 6, on_collapse="tighten"))
    monkeypatch.setattr(Tighten, "__call__", mock.Mock(side_effect=RuntimeError("a processor broke")))
    result = drain(engine)
    assert isinstance(result[bad][-1], RequestFailed) and "RuntimeError" in str(result[bad][-1])
    assert isinstance(result[good][-1], RequestOutput) and engine.pool.used == 0


@pytest.mark.grid(fast=5, slow=4)
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("breaks", ["admit", "run", "remove"])
def test_what_a_broken_step_leaves_is_dropped(model, pocket, monkeypatch, steps, breaks):
    """Also where the scheduler has admitted a request that the batch never got."""
    asked = [job(5 + seed, 9, seed, exit_config=CONFIGS[seed]) for seed in range(6)]
    expected = [outcome(alone(model, pocket[1], item)) for item in asked]
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 16, 64, 4, POSITION_BYTES * 4 * 40))
    for item in asked:
        engine.submit(item)
    for _ in range(steps):
        engine.step()
    whole = getattr(engine._batch, breaks)

    def broken(*arguments):
        if breaks == "remove":
            # half of it
            whole(*arguments)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine._batch, breaks, broken)
        with pytest.raises(MemoryError):
            drain(engine)
    engine.reset()
    assert not engine.has_work and engine.status().running == engine.status().blocks_used == engine.pool.cached == 0
    keys = [engine.submit(item) for item in asked]
    events = drain(engine)
    assert [outcome(events[key]) for key in keys] == expected and engine.status().blocks_used == 0
