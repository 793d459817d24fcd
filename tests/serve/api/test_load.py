"""A full queue, clients that leave, time that is over, and an end in peace."""

import asyncio
import http.client
import json
import threading

import httpx
import openai
import pytest

from sigma0.serve.api import handlers as answering
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import drain
from sigma0.serve.api.requests import RequestParser
from tests.serve.api.test_chat import ASKED, SAID, lines, post
from tests.serve.conftest import served

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


def begin(server, **body):
    """A request in a thread, and where its answer comes."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(server, **body)))
    known = len(server.service.tickets)
    thread.start()
    until(lambda: len(server.service.tickets) > known)
    return thread, answers


def test_a_full_queue_asks_to_come_back(held):
    first, answers = begin(held)
    until(lambda: held.service.status().running)
    second, others = begin(held)
    refused = post(held)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        held.client.chat.completions.create(**ASKING)
    held.service.gate.set()
    first.join()
    second.join()
    assert [each.status_code for each in answers + others] == [200, 200]


def test_too_many_requests_at_once(pocket):
    with served(pocket, ServerSettings(max_concurrent=1)) as server:
        server.service.gate.clear()
        thread, answers = begin(server)
        assert post(server).status_code == 429
        server.service.gate.set()
        thread.join()
        assert answers[0].status_code == 200 and post(server).status_code == 200


@pytest.mark.parametrize("running", [True, False])
def test_who_leaves_a_stream_frees_the_service(held, running):
    ahead = None if running else begin(held)
    with httpx.stream("POST", f"{held.url}/v1/chat/completions", json={**ASKING, "stream": True}) as answer:
        assert "assistant" in next(answer.iter_lines())
        until(lambda: len(held.service.tickets) == (1 if running else 2))
    until(lambda: held.service.tickets[-1].cancelled)
    held.service.gate.set()
    if ahead is not None:
        ahead[0].join()
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
    until(lambda: [each.cancelled for each in held.service.tickets] == [True, True])
    until(lambda: held.app.state.answerer.open == 0)
    held.service.gate.set()
    assert post(held).json()["choices"][0]["message"]["content"] == SAID


def test_openais_client_leaves_by_closing(held):
    held.service.gate.set()
    with held.client.chat.completions.create(**ASKING, stream=True) as stream:
        next(iter(stream))
        held.service.gate.clear()
    until(lambda: held.service.tickets[0].cancelled or held.service.status().tokens)
    until(lambda: held.app.state.answerer.open == 0)


def test_time_that_is_over(pocket):
    with served(pocket, ServerSettings(request_timeout=0.2)) as server:
        server.service.gate.clear()
        answer = post(server)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        told = post(server, stream=True)
        assert told.status_code == 200 and json.loads(lines(told.text)[-1])["error"]["code"] == "timeout"
        until(lambda: [each.cancelled for each in server.service.tickets] == [True, True])


def test_an_end_in_peace(held):
    thread, answers = begin(held, stream=True)
    ending = threading.Thread(target=lambda: asyncio.run(drain(held.app)))
    ending.start()
    until(lambda: held.app.state.answerer.draining)
    refused = post(held)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert httpx.get(f"{held.url}/health").status_code == 503
    held.service.gate.set()
    ending.join()
    thread.join()
    assert lines(answers[0].text)[-1] == "[DONE]"


def test_who_stays_and_does_not_read_loses_its_place(pocket, monkeypatch):
    """A client whose connection is full holds neither a place nor the engine beyond its time."""
    monkeypatch.setattr(answering, "SENDING", 0.2)
    with served(pocket, ServerSettings(request_timeout=0.5)) as server:
        body = json.dumps({**ASKING, "stream": True}).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        path = "/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        with pytest.raises(ConnectionAbortedError):
            asyncio.run(asyncio.wait_for(server.app(scope, receive, send), 10))
        assert server.app.state.answerer.open == 0


def test_a_request_that_is_cancelled_from_outside_ends_its_job_and_counts(held):
    """A server in front may tell so that the client left."""
    body = json.dumps(ASKING).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def run():
        answering = asyncio.ensure_future(held.app(scope, receive, None))
        while not held.service.tickets:
            await asyncio.sleep(0.005)
        answering.cancel()
        await asyncio.wait({answering})
        assert answering.cancelled()

    asyncio.run(asyncio.wait_for(run(), 20))
    until(lambda: held.service.tickets[0].cancelled and held.app.state.answerer.open == 0)
    assert "sigma0_cancelled_total 1.0" in httpx.get(f"{held.url}/metrics").text


def test_requests_that_are_taken_apart_count(pocket, monkeypatch):
    """A flood that only the tokenizer has seen so far is refused as one that the engine has."""
    entered, go_on, plan = threading.Event(), threading.Event(), RequestParser.plan

    def slow(planner, body):
        entered.set()
        go_on.wait()
        return plan(planner, body)

    monkeypatch.setattr(RequestParser, "plan", slow)
    with served(pocket, ServerSettings(max_concurrent=1)) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(server)))
        thread.start()
        entered.wait()
        try:
            assert httpx.post(f"{server.url}/v1/chat/completions", json=ASKING, timeout=60).status_code == 429
        finally:
            go_on.set()
            thread.join()
        assert answers[0].status_code == 200 and post(server).status_code == 200
