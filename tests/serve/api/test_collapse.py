"""Texts that run in circles, on the server: ended as the library ends them, by default and by request."""

import json

import pytest

import sigma0
from sigma0 import ExitConfig
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import EngineLimits, EngineRequest
from tests.serve.api.test_chat import lines
from tests.serve.api.test_completions import post as complete
from tests.serve.conftest import served
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import drain

CIRCLES, ORDINARY = "The key is in", "Mary went to the park. The hat is with Mary. Where is the hat?"


def post(server, prompt=CIRCLES, sigma0=None, **body):
    # under this setting the text runs in circles within its limit
    sigma0 = {"exit": {"mode": "qexit", "q": 0.6}, **(sigma0 or {})}
    return complete(server, prompt=prompt, max_tokens=64, sigma0=sigma0, **body)


@pytest.mark.grid(fast=2, slow=3)
@pytest.mark.parametrize("after_exit", ["finish", "verify", "drop"])
@pytest.mark.parametrize("how", ["stop", "tighten", "ignore"])
def test_the_engine_writes_what_the_library_writes(pocket, how, after_exit):
    model, tokenizer = pocket
    config = ExitConfig(q=0.3, after_exit=after_exit)
    engine = Engine(model, tokenizer, "pocket", EngineLimits(kv_bytes=KV))
    texts = ["The", ORDINARY, CIRCLES]
    keys = []
    for text in texts:
        ids = tuple(tokenizer(text)["input_ids"])
        keys.append(engine.submit(EngineRequest(ids, 80, config, on_collapse=how, context=(text,))))
    events = drain(engine)
    done = [events[key][-1] for key in keys]
    settings = {"max_new_tokens": 80, "exit_config": config, "on_collapse": how}
    for result, text in zip(done, texts, strict=True):
        alone = sigma0.generate(model, tokenizer, text, **settings, do_sample=False)
        assert result.text == alone.text and [item.id for item in result.tokens] == [item.id for item in alone.tokens]
        assert result.collapsed == (alone.stop_reason == "collapse")
        assert result.finish_reason == ("length" if alone.stop_reason == "length" else "stop")
        assert result.verdict.reason == alone.verdict.reason and result.door == alone.door
    if how == "stop" and after_exit != "drop":
        assert any(item.collapsed for item in done) and not done[1].collapsed


def test_a_text_that_runs_in_circles_ends_with_a_standard_reason(plain):
    raw = post(plain).json()
    (choice,), (output,) = raw["choices"], raw["sigma0"]["choices"]
    assert choice["finish_reason"] == "stop" and raw["usage"]["completion_tokens"] < 64
    assert output["collapsed"] is True and output["verdict"]["reason"] == "collapse" and output["door"] == "escalate"
    *_, last, done = lines(post(plain, stream=True).text)
    last = json.loads(last)
    assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "stop"
    assert last["sigma0"]["choices"][0]["collapsed"] is True
    assert post(plain, ORDINARY).json()["sigma0"]["choices"][0]["collapsed"] is False


def test_a_request_may_ask_for_something_else(plain):
    raw = post(plain, sigma0={"on_collapse": "ignore"}).json()
    assert raw["choices"][0]["finish_reason"] == "length" and raw["usage"]["completion_tokens"] == 64
    tightened = post(plain, sigma0={"on_collapse": "tighten"}).json()["choices"][0]["text"]
    assert tightened != raw["choices"][0]["text"]


def test_a_server_may_have_another_default(pocket):
    with served(pocket, ServerSettings(on_collapse="ignore")) as server:
        assert post(server).json()["choices"][0]["finish_reason"] == "length"
        assert post(server, sigma0={"on_collapse": "stop"}).json()["choices"][0]["finish_reason"] == "stop"
