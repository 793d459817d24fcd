"""The engine on captured steps: the outputs of the eager runner, over buffers that stay in place."""

from dataclasses import replace

import numpy as np
import pytest

from sigma0 import ExitConfig
from sigma0.decode import batch, graph_runner, runners
from sigma0.decode.ops import TORCH, depth_attention_reference
from sigma0.decode.programs import tensors_of
from sigma0.decode.transfer import Landing
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.decode.captures import RepeatedCapture
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import CONFIGS, POSITION_BYTES, SAMPLINGS, drain, model, outcome, pocket  # noqa: F401


@pytest.fixture
def captures(monkeypatch, model):  # noqa: F811
    """The captures that were made, in place of CUDA's."""
    made = []

    def capture(device):
        made.append(RepeatedCapture(device))
        return made[-1]

    monkeypatch.setattr(runners, "CAPTURES", {"cpu": capture})
    monkeypatch.setattr(runners, "LATE_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(graph_runner, "_SHORTEST", 64)
    # attention whose calls depend on no value, as a kernel on a device
    ops = replace(TORCH, depth_attention=depth_attention_reference)
    monkeypatch.setattr(type(model), "operations", property(lambda self: ops))
    return made


def work(seed, count, configs=CONFIGS):
    rng = np.random.default_rng(seed)
    return [
        EngineRequest(
            prompt_ids=tuple(rng.integers(5, 60, rng.integers(1, 30)).tolist()),
            max_new_tokens=int(rng.integers(1, 12)),
            exit_config=configs[rng.integers(len(configs))],
            sampling=SAMPLINGS[rng.integers(len(SAMPLINGS))],
            logprobs=[None, 2][rng.integers(2)],
        )
        for _ in range(count)
    ]


def outcomes(model, tokenizer, jobs, runner, watch, blocks=KV):  # noqa: F811
    """Of requests of which some come later and one is cancelled; and the engine."""
    model.runner = runner
    try:
        engine = Engine(
            model, tokenizer, "tiny", EngineLimits(max_running=4, kv_bytes=blocks, page_size=8), watch=watch
        )
    finally:
        model.runner = "auto"
    keys, events = [engine.submit(job) for job in jobs[::2]], {}
    for number in range(6):
        for key, event in engine.step():
            events.setdefault(key, []).append(event)
        if number == 2:
            engine.cancel(keys[1])
    keys += [engine.submit(job) for job in jobs[1::2]]
    for key, later in drain(engine).items():
        events.setdefault(key, []).extend(later)
    told = [events.get(key, []) for number, key in enumerate(keys) if number != 1]
    return [outcome(each) if watch else [token.id for token in each[-1].tokens] for each in told], engine


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_the_eager_runners(model, pocket, captures, seed, watch):  # noqa: F811
    jobs = work(seed, 9)
    eager, _ = outcomes(model, pocket[1], jobs, "eager", watch)
    captured, engine = outcomes(model, pocket[1], jobs, "auto", watch)
    assert engine.runner.captured and not engine.runner.late
    assert captured == eager
    assert captures[-1].replays > 20


@pytest.mark.exhaustive
def test_preempted_requests_write_the_same(model, pocket, captures):  # noqa: F811
    jobs = [replace(job, max_new_tokens=11) for job in work(5, 8)]
    eager, _ = outcomes(model, pocket[1], jobs, "eager", True)
    captured, engine = outcomes(model, pocket[1], jobs, "auto", True, 96 * POSITION_BYTES)
    assert engine.status().preemptions > 0
    assert [each[0] for each in captured] == [each[0] for each in eager]


@pytest.mark.exhaustive
def test_buffers_stay_in_place_and_captures_are_few(model, pocket, captures):  # noqa: F811
    configs = [ExitConfig(q=0.5), ExitConfig(mode="margin", theta=0.3), ExitConfig(mode="converge", eps=0.4)]
    jobs = [replace(job, max_new_tokens=40, sampling=SAMPLINGS[0]) for job in work(7, 12, configs)]
    engine = Engine(model, pocket[1], "tiny", EngineLimits(max_running=4, kv_bytes=KV, page_size=8), watch=False)
    for job in jobs:
        engine.submit(job)
    running, places, passes = engine._batch, None, 0
    while engine.has_work:
        engine.step()
        passes += 1
        if passes > 4:
            held = [*tensors_of([running.lanes, running._settings]), *tensors_of(running.planes)]
            now = [tensor.data_ptr() for tensor in held if tensor.numel()]
            assert places in (None, now)
            places = now
    assert passes > 100 and captures[-1].replays > 90
    # a bound on rows and one on positions, each a power of two, for a few programs
    assert captures[-1].captures <= 24


class CountedLanding(Landing):
    """A landing whose making is counted."""

    made = 0

    def __init__(self, tensor):
        type(self).made += 1
        super().__init__(tensor)


@pytest.fixture
def device(monkeypatch):
    """Reads of the table as on a device, where the host has a copy, and how many there are; landings are counted."""
    reads = []

    def copied(tensor):
        reads.append(tensor.shape)
        return tensor.numpy().copy()

    monkeypatch.setattr(CountedLanding, "made", 0)
    monkeypatch.setattr("sigma0.decode.runner.Landing", CountedLanding)
    monkeypatch.setattr(batch, "to_host", copied)
    opened = batch.RunningBatch.__init__

    def without_memory_of_the_host(self, *arguments):
        opened(self, *arguments)
        self._table = None
        self._runner.shows_lanes = True

    monkeypatch.setattr(batch.RunningBatch, "__init__", without_memory_of_the_host)
    return reads


def test_a_pass_is_waited_for_once(model, pocket, captures, device):  # noqa: F811
    jobs = [replace(job, max_new_tokens=30, exit_config=CONFIGS[0]) for job in work(3, 3)]
    engine = Engine(model, pocket[1], "tiny", EngineLimits(max_running=4, kv_bytes=KV, page_size=8), watch=False)
    for job in jobs:
        engine.submit(job)
    for _ in range(8):
        engine.step()
    device.clear()
    CountedLanding.made = 0
    for _ in range(20):
        engine.step()
    assert engine.status().running == 3
    assert (CountedLanding.made, device) == (20, [])


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("watch", [True, False])
def test_what_a_device_shows_is_enough(model, pocket, captures, device, watch):  # noqa: F811
    jobs = [replace(job, max_new_tokens=11) for job in work(5, 8)]
    found = {}
    for runner in ("auto", "eager"):
        told, engine = outcomes(model, pocket[1], jobs, runner, watch, 96 * POSITION_BYTES)
        found[runner] = told, replace(engine.status(), preemptions=0)
        assert engine.status().preemptions > 0
        if runner == "auto":
            assert 0 < len(device) < CountedLanding.made
    assert found["auto"] == found["eager"]


@pytest.mark.slow
def test_an_engine_that_was_reset_writes_the_same(model, pocket, captures):  # noqa: F811
    jobs = [job for job in work(8, 8) if job.exit_config.after_exit != "drop"]
    expected, engine = outcomes(model, pocket[1], jobs, "cudagraph", True)
    for job in jobs:
        engine.submit(job)
    for _ in range(5):
        engine.step()
    engine.reset()
    assert not engine.has_work and engine.status().blocks_used == 0
    keys = [engine.submit(job) for job in jobs[::2] + jobs[1::2]]
    events = drain(engine)
    assert [outcome(events[key]) for number, key in enumerate(keys) if number != 1] == expected
