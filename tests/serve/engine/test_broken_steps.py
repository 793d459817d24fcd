"""What a step that breaks leaves behind."""

import numpy as np
import pytest

from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.serve.engine.test_engine import CONFIGS, POSITION_BYTES, alone, drain, model, outcome  # noqa: F401


@pytest.mark.grid(fast=5, slow=4)
@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("breaks", ["admit", "run", "remove"])
def test_what_a_broken_step_leaves_is_dropped(model, pocket, monkeypatch, steps, breaks):  # noqa: F811
    """Also where the scheduler has admitted a request that the batch never got."""
    asked = [request(seed, new=9) for seed in range(6)]
    expected = [outcome(alone(model, pocket[1], job)) for job in asked]
    engine = Engine(model, pocket[1], "tiny", EngineLimits(2, 16, page_size=4, kv_bytes=POSITION_BYTES * 4 * 40))
    for job in asked:
        engine.submit(job)
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
    keys = [engine.submit(job) for job in asked]
    events = drain(engine)
    assert [outcome(events[key]) for key in keys] == expected and engine.status().blocks_used == 0


def request(seed, new):
    ids = np.random.default_rng(seed).integers(5, 60, 5 + seed)
    return EngineRequest(tuple(ids.tolist()), new, CONFIGS[seed % len(CONFIGS)])
