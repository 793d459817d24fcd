"""Requests with a grammar share passes with all others, and each is what it would be alone."""

import threading
from dataclasses import replace
from queue import SimpleQueue
from unittest import mock

import numpy as np
import pytest

from sigma0.decode.grammar.spec import Choice, JsonSchema, Regex
from sigma0.decode.sampling_params import SamplingParams
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineLoop
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestFailed, RequestOutput
from sigma0.serve.engine.wire import Cancel, Submit, Tell
from tests.byte_model import byte_model
from tests.decode.captures import called_by
from tests.schemas import OBJECTS, REFERENCES
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_conformance import served
from tests.serve.engine.test_engine import CONFIGS, alone, drain, outcome

SPECS = (
    None,
    *(JsonSchema.of(schema) for schema in (OBJECTS[2], OBJECTS[7], OBJECTS[16], OBJECTS[-1], REFERENCES[1])),
    Regex("[a-c]{5,9}(x|y)"),
    Choice(("first", "second")),
)
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.0, seed=4), SamplingParams(repetition_penalty=1.3))
# Blocks of K/V: for all requests, and so few that some are preempted.
MANY, FEW = 200, 32


@pytest.fixture(scope="module")
def byte():
    return byte_model(3)


def jobs(seed, count):
    rng = np.random.default_rng(seed)
    return [
        EngineRequest(
            prompt_ids=tuple(rng.integers(0, 256, rng.integers(1, 30)).tolist()),
            max_new_tokens=40,
            exit_config=CONFIGS[rng.integers(len(CONFIGS))],
            sampling=SAMPLINGS[rng.integers(len(SAMPLINGS))],
            logprobs=[None, 2][rng.integers(2)],
            on_collapse="ignore",
            grammar=SPECS[place % len(SPECS)],
        )
        for place in range(count)
    ]


def written(done):
    """The answer of a request, without figures that other shapes round otherwise."""
    return [(token.id, token.depth, token.reason, token.text, token.fate) for token in done.tokens]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("seed, blocks", [*((seed, MANY) for seed in (0, 1, 2)), (3, FEW), (4, FEW)])
def test_neither_company_nor_preemption_changes_anything(byte, seed, blocks):
    wanted = jobs(seed, 16 if blocks == MANY else 12)
    result, engine = served(*byte, wanted, blocks)
    assert (engine.status().preemptions > 0) == (blocks == FEW)
    # what is recomputed is counted in the passes
    same = slice(4) if blocks == FEW else slice(None)
    for job, done in zip(wanted, result, strict=True):
        assert outcome([done])[same] == outcome(alone(*byte, job))[same]


@pytest.mark.exhaustive
@pytest.mark.parametrize("watch", [False, True])
def test_captured_steps_write_the_same(byte, watch):
    wanted = [job for job in jobs(5, 16) if job.exit_config.after_exit != "drop"]
    with called_by("captured", byte[0]) as (asked, captures):
        result, engine = served(*byte, wanted, MANY, watch=watch, **asked)
    assert engine.runner.name == "cudagraph" and captures
    expected, _ = served(*byte, wanted, MANY, watch=watch, runner="eager")
    assert list(map(written, result)) == list(map(written, expected))


def test_requests_without_a_grammar_cost_nothing_more(byte):
    engine = Engine(*byte, "tiny", EngineLimits(max_running=4, kv_bytes=KV))
    lanes, runner = engine._batch.lanes, engine._batch._runner
    plain = replace(jobs(0, 1)[0], grammar=None)
    engine.submit(plain)
    drain(engine)
    assert lanes.masks is None and not runner.program.masked
    engine.submit(replace(plain, grammar=SPECS[1]))
    engine.step()
    assert runner.program.masked
    drain(engine)
    engine.submit(plain)
    engine.step()
    assert not runner.program.masked and bool((lanes.masks == -1).all() and (lanes.only == -1).all())


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(byte):
    """Requests that were cancelled would hold up those after them, and count nowhere."""
    begun, go, compiled = threading.Semaphore(0), threading.Event(), []

    class Slow(Engine):
        def compile(self, request):
            compiled.append(request.grammar)
            begun.release()
            assert go.wait(60)
            return super().compile(request)

    job = jobs(0, 2)[1]
    inbox, reports = SimpleQueue(), []
    loop = EngineLoop(Slow(*byte, "tiny"), inbox, reports.append)
    for key in range(9):
        inbox.put(Submit(key, replace(job, grammar=Choice((f"text {key}", "b")))))
    loop.turn()
    for _ in range(4):
        assert begun.acquire(timeout=60)
    for key in range(8):
        inbox.put(Cancel(key))
    loop.turn()
    go.set()
    inbox.put(Tell.DRAIN)
    while not loop.is_over:
        loop.turn()
    assert {spec.choices[0] for spec in compiled} == {f"text {key}" for key in (0, 1, 2, 3, 8)}
    ended = [key for report in reports for key, event in report.events if isinstance(event, RequestOutput)]
    assert ended == [8]


class Panic(BaseException):
    """As a library in Rust has it."""


def test_a_panic_while_a_grammar_is_compiled_is_told(byte, monkeypatch):
    inbox, reports = SimpleQueue(), []
    engine = Engine(*byte, "tiny")
    loop = EngineLoop(engine, inbox, reports.append)
    monkeypatch.setattr(engine, "compile", mock.Mock(side_effect=Panic))
    inbox.put(Submit(7, jobs(0, 2)[1]))
    inbox.put(Tell.DRAIN)
    while not loop.is_over:
        loop.turn()
    ((key, event),) = [item for report in reports for item in report.events]
    assert key == 7 and isinstance(event, RequestFailed)
