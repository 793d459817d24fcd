"""The engine in a process of its own: the same answers, and what happens when either side ends."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import httpx
import pytest

from sigma0 import ExitConfig
from sigma0.decode.grammar.spec import JsonSchema, Regex, Tool, ToolCalls
from sigma0.decode.sampling_params import SamplingParams
from sigma0.models.load import load
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.engine.child import EngineProcess
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import Busy, RequestFailed, RequestOutput
from sigma0.serve.engine.process import ProcessService
from sigma0.serve.engine.wire import EngineSpec
from sigma0.signals.verdict import door
from tests.serve.api.test_connections import LONG
from tests.serve.conftest import serving
from tests.serve.engine.test_worker import LIMITS, collect, collect_one, job
from tests.test_cli import run

pytestmark = pytest.mark.slow

CALLS = ToolCalls((Tool("stop", JsonSchema.of({"type": "object", "properties": {}})),), "hermes", "call")
SPEC = EngineSpec("pocket", LIMITS, device="cpu", dtype="float32")
# a service that has a long request under way when it names its engine's process
PARENT = """
import asyncio
from sigma0.config import ExitConfig
from sigma0.serve.engine.messages import EngineRequest
from sigma0.serve.engine.process import ProcessService
from sigma0.serve.engine.wire import EngineSpec

async def run():
    service = ProcessService(EngineSpec("pocket", device="cpu"), 1)
    await anext(service.submit(EngineRequest((5, 6, 7), 1900, ExitConfig(mode="full"), on_collapse="ignore")))
    print(service.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""


@pytest.fixture(scope="module")
def service():
    with closing(ProcessService(SPEC, 1)) as made:
        yield made


def test_two_who_wait_for_the_end_of_a_process_are_both_told_its_status(monkeypatch):
    reap = os.waitpid

    def reap_slowly(*asked):
        result = reap(*asked)
        # meanwhile another thread is told that there is no such process
        time.sleep(0.1)
        return result

    monkeypatch.setattr(os, "waitpid", reap_slowly)
    process = EngineProcess()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(process.end, (0.0, 0.0))) == [-signal.SIGKILL] * 2
    assert process.how_it_ended() == "the engine's process was killed by SIGKILL"


async def test_a_rule_of_the_door_reaches_the_engine(pocket):
    spec = replace(SPEC, door_rule="certificate")
    with closing(EngineService(spec.build())) as service:
        *_, done = await collect_one(service, job(pocket, exit_config=ExitConfig(mode="fixed", depth=2)))
    # at a depth that was set beforehand nobody knows whether it converged
    assert done.door == "escalate" and "whether it converged is not known" in done.door_text
    assert door(done.verdict, replace(pocket[0].door_policy, rule="certificate")) == "escalate"


def requests(pocket):
    """One of each kind: rules, what follows an exit, sampling, stop strings and log-probabilities."""
    sampled = SamplingParams(temperature=1.0, top_k=20, seed=7)
    return [
        job(pocket),
        job(pocket, exit_config=ExitConfig(q=0.6, after_exit="verify")),
        job(pocket, exit_config=ExitConfig(q=0.6, after_exit="drop"), sampling=sampled),
        job(pocket, exit_config=ExitConfig(mode="full"), stop=("kitchen",), logprobs=3),
        *(job(pocket, grammar=spec) for spec in (Regex("[a-c]{5}"), JsonSchema.of({"type": "boolean"}), CALLS)),
    ]


async def test_outputs_are_those_of_a_thread(service, pocket):
    async def answers(one):
        return await asyncio.gather(*(collect(one.submit(request)) for request in requests(pocket)))

    with closing(EngineService(Engine(*pocket, "pocket", LIMITS))) as thread:
        expected = await answers(thread)
    outputs = await answers(service)
    assert outputs == expected and all(isinstance(events[-1], RequestOutput) for events in outputs)
    # how many passes it took depends on when each request came
    assert replace(service.status(), passes=0) == replace(thread.status(), passes=0)


def test_what_is_known_of_the_model_is_what_the_model_says(service, pocket):
    model, tokenizer = pocket
    thread = EngineService(Engine(*pocket, "pocket", LIMITS))
    thread.close()
    assert (service.name, service.context) == (thread.name, thread.context)
    assert service.model.num_loops == model.num_loops and service.model.name_or_path == model.name_or_path
    assert service.model.config.to_dict() == model.config.to_dict()
    # a model that was saved before holds these with every field: what they resolve to is compared below
    compared = {"exit_config": None, "confidence_model": None, "door_policy": None}
    output, current = (item.generation_config.to_dict() | compared for item in (service.model, model))
    assert output == current
    assert service.model.confidence_model == model.confidence_model is not None
    assert service.model.door_policy == model.door_policy
    assert service.model.resolve_exit_config(None) == model.resolve_exit_config(None)
    text = "Where is Mary?<|im_end|>"
    assert service.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    texts = [item.apply_chat_template(chat, tokenize=False) for item in (service.tokenizer, tokenizer)]
    assert texts[0] == texts[1]
    assert not hasattr(service.model, "parameters")


def test_signals_for_the_whole_group_do_not_end_it(service, pocket):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(service.pid, number)
    assert isinstance(asyncio.run(collect_one(service, job(pocket)))[-1], RequestOutput)


def test_a_failure_keeps_what_it_says_on_its_way():
    said = ("FloatingPointError inside of this request", "FloatingPointError")
    failure = pickle.loads(pickle.dumps(RequestFailed(*said)))
    assert (str(failure), failure.cause) == said


async def test_draining_finishes_what_was_taken_and_ends_the_process(service, pocket):
    """The last one with this service."""
    assert service.is_up
    asked = [asyncio.ensure_future(collect_one(service, job(pocket))) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.wait_for(service.drain(), 60)
    with pytest.raises(Busy, match="shut down"):
        service.submit(job(pocket))
    result = await asyncio.gather(*asked)
    assert all(isinstance(events[-1], RequestOutput) for events in result)
    assert not service.is_up and service._process.end(60) == 0


def test_an_engine_that_is_killed_fails_its_requests_and_is_missed(caplog):
    with closing(ProcessService(SPEC, 1)) as service, serving(create_app(service, ServerSettings())) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            os.kill(service.pid, signal.SIGKILL)
            *_, event, data = lines
        error = json.loads(data.removeprefix("data: "))["error"]
        assert (event, error["code"]) == ("event: error", "unavailable")
        assert "the engine's process was killed by SIGKILL" in error["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": False}, timeout=60)
        assert refused.status_code == 503 and "SIGKILL" in refused.json()["error"]["message"]
    assert "the engine's process was killed by SIGKILL: no more requests are taken" in caplog.text


def test_the_process_ends_with_the_one_that_started_it():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            pid = int(parent.stdout.readline())
        finally:
            parent.kill()
        try:
            # both hold the pipe that is read here: its end is that of both
            assert parent.communicate(timeout=60)[0] == ""
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)
            raise


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_loaded_is_refused_in_the_same_words(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "ouro", "hidden_size": "many"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded") as expected:
        load(str(tmp_path))
    output = run("serve", str(tmp_path), "--port", "0")
    assert output.exit_code == 2 and " ".join(output.stderr.split()).endswith(f"error: {expected.value}")


def test_a_process_that_ends_while_it_loads_is_told_so():
    with pytest.raises(ChildProcessError, match="killed by SIGKILL before the model was loaded"):
        ProcessService(Dying("pocket"))


class Dying(EngineSpec):
    """Kills the process that builds it, as a machine out of memory does."""

    def build(self):
        os.kill(os.getpid(), signal.SIGKILL)
