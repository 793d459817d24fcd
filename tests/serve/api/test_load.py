"""A full queue, clients that leave, time that is over, and an end in peace."""

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from sigma0.serve.api import handlers as answering
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import drain
from sigma0.serve.api.requests import RequestParser
from tests.serve.api.test_chat import ASKED, SAID, leaving, lines, post
from tests.serve.conftest import held_up, served

ASKING = {"model": "pocket", "messages": ASKED, "max_tokens": 20}


def until(true, tries=24_000):
    """Waits for what a server does in its own time."""
    for _ in range(tries):
        if true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")


@pytest.fixture
def held(pocket):
    """A server that takes one job and lets one wait, and writes nothing until its gate is open."""
    with served(pocket, limit=1) as server:
        server.service.gate.clear()
        yield server
        server.service.gate.set()


def begun(server, ask=post, **body):
    """The answer that is to come to a request in a thread."""
    return ThreadPoolExecutor(1).submit(ask, server, **body)


def begin(server, **body):
    """The same, once the request has come to the engine."""
    known = len(server.service.tickets)
    answer = begun(server, **body)
    until(lambda: len(server.service.tickets) > known)
    return answer


def test_a_full_queue_asks_to_come_back(held):
    first = begin(held)
    until(lambda: held.service.status().running)
    second = begin(held)
    refused = post(held)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        held.client.chat.completions.create(**ASKING)
    held.service.gate.set()
    assert first.result().status_code == second.result().status_code == 200


@pytest.mark.parametrize(
    "limit, where", [("max_concurrent", "engine"), ("max_concurrent", "parser"), ("max_parsing", "parser")]
)
def test_too_many_requests_at_once(pocket, monkeypatch, limit, where):
    """Those that only the tokenizer has seen so far count as those that the engine has."""
    slow, entered, go_on = held_up(RequestParser.parse)
    with served(pocket, ServerSettings(**{limit: 1})) as server:
        if where == "engine":
            server.service.gate.clear()
            answer = begin(server)
        else:
            monkeypatch.setattr(RequestParser, "parse", slow)
            answer = begun(server)
            assert entered.wait(60)
        try:
            refused = post(server)
        finally:
            go_on.set()
            server.service.gate.set()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert answer.result().status_code == post(server).status_code == 200


@pytest.mark.parametrize("running", [True, False])
def test_who_leaves_a_stream_frees_the_service(held, running):
    ahead = None if running else begin(held)
    with leaving(held) as answer:
        assert "assistant" in next(answer.iter_lines())
        until(lambda: len(held.service.tickets) == (1 if running else 2))
    until(lambda: held.service.tickets[-1].cancelled)
    held.service.gate.set()
    if ahead is not None:
        ahead.result()
    until(lambda: held.service.status().running == held.service.status().waiting == 0)
    assert post(held).status_code == 200
    assert "sigma0_cancelled_total 1.0" in httpx.get(f"{held.url}/metrics").text


def test_who_leaves_a_whole_answer_frees_the_service(held):
    address = httpx.URL(held.url)
    connection = http.client.HTTPConnection(address.host, address.port)
    body = json.dumps({**ASKING, "n": 2})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    until(lambda: len(held.service.tickets) == 2)
    connection.close()
    until(lambda: [item.cancelled for item in held.service.tickets] == [True, True])
    until(lambda: held.app.state.handler.open == 0)
    held.service.gate.set()
    assert post(held).json()["choices"][0]["message"]["content"] == SAID


def test_time_that_is_over(pocket):
    with served(pocket, ServerSettings(request_timeout=0.2)) as server:
        server.service.gate.clear()
        answer = post(server)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        output = post(server, stream=True)
        assert output.status_code == 200 and json.loads(lines(output.text)[-1])["error"]["code"] == "timeout"
        until(lambda: [item.cancelled for item in server.service.tickets] == [True, True])


def test_an_end_in_peace(held):
    answer = begin(held, stream=True)
    ending = ThreadPoolExecutor(1).submit(asyncio.run, drain(held.app))
    until(lambda: held.app.state.handler.draining)
    refused = post(held)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert httpx.get(f"{held.url}/health").status_code == 503
    held.service.gate.set()
    ending.result()
    assert lines(answer.result().text)[-1] == "[DONE]"


def asgi(app, send, **body):
    """A request that no server brings: its answer goes to `send`, and its client stays."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": json.dumps({**ASKING, **body}).encode(), "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    return app(scope, receive, send)


def test_who_stays_and_does_not_read_loses_its_place(pocket, monkeypatch):
    """A client whose connection is full holds neither a place nor the engine beyond its time."""
    monkeypatch.setattr(answering, "SENDING", 0.2)

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with served(pocket, ServerSettings(request_timeout=0.5)) as server:
        with pytest.raises(ConnectionAbortedError):
            asyncio.run(asyncio.wait_for(asgi(server.app, send, stream=True), 10))
        assert server.app.state.handler.open == 0


async def test_a_request_that_is_cancelled_from_outside_ends_its_job_and_counts(held):
    """A server in front may tell so that the client left."""
    answering = asyncio.ensure_future(asgi(held.app, None))
    while not held.service.tickets:
        await asyncio.sleep(0.005)
    answering.cancel()
    await asyncio.wait({answering})
    assert answering.cancelled()
    until(lambda: held.service.tickets[0].cancelled and held.app.state.handler.open == 0)
    assert "sigma0_cancelled_total 1.0" in httpx.get(f"{held.url}/metrics").text
