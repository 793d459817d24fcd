"""Floods: large requests, and those of more choices than the queue holds, keep nothing from others."""

import asyncio
import gc
import json
import threading
from unittest import mock

import httpx
import pytest
import torch

from sigma0.serve.api import large
from sigma0.serve.api import requests as planning
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.errors import ApiError
from sigma0.serve.api.large import LARGE, LargeBodies, turn_is_over
from sigma0.serve.api.requests import RequestParser
from sigma0.serve.api.turns import Backlog, Turns
from sigma0.serve.engine.messages import Busy, ShuttingDown
from tests.serve.api.test_chat import post
from tests.serve.api.test_completions import post as complete
from tests.serve.api.test_load import begun, until
from tests.serve.api.test_refusals import error_of
from tests.serve.conftest import served

WORD = "Mary went to the kitchen. "
MEGABYTE = 2**20 - 200


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": WORD * (MEGABYTE // len(WORD))}]},
        {"messages": [{"role": "user", "content": "hi you"}] * (MEGABYTE // 40)},
        {"messages": [{"role": "user", "content": ""}] * 5000},
        {"prompt": WORD * (MEGABYTE // len(WORD))},
        {"prompt": ["short", "\U0001f600" * (MEGABYTE // 12)]},
        {"prompt": [5] * (MEGABYTE // 3)},
        {"prompt": [[5], [5] * 2049]},
    ],
    ids=["text", "many messages", "empty messages", "completion", "the second", "ids", "lists of ids"],
)
def test_what_never_fits_is_refused_by_its_length_alone(plain, monkeypatch, body):
    encode = mock.Mock(wraps=planning.encode)
    monkeypatch.setattr(planning, "encode", encode)
    error = error_of((post if "messages" in body else complete)(plain, **body), 400)
    assert error["code"] == "context_length_exceeded" and "limit of 2048" in error["message"]
    assert [call.args[1] for call in encode.call_args_list] in ([], ["short"])


def test_what_may_fit_is_tokenized(plain, monkeypatch):
    """As many of the longest tokens as fit are the longest text that may."""
    encode = mock.Mock(return_value=[torch.ones(9)])
    monkeypatch.setattr(planning, "encode", encode)
    longest = len('{"action": "edit", "path": "')
    for size, is_tokenized in ((2048 * longest, True), (2048 * longest + 1, False)):
        answer = complete(plain, prompt="x" * size, max_tokens=1)
        assert encode.called == is_tokenized, answer.text
        encode.reset_mock()


def test_large_ones_are_read_one_by_one_and_others_beside_them(pocket, monkeypatch):
    entered, go_on, plan = [], threading.Event(), RequestParser.parse

    def slow(planner, body):
        if len(str(body.messages)) > LARGE:
            entered.append(body)
            go_on.wait(60)
        return plan(planner, body)

    monkeypatch.setattr(RequestParser, "parse", slow)
    with served(pocket) as server:
        big = {"messages": [{"role": "user", "content": WORD * (LARGE // len(WORD) + 1)}], "max_tokens": 1}
        asked = [begun(server, **big) for _ in range(3)]
        try:
            until(lambda: entered)
            assert post(server).status_code == 200 and len(entered) == 1
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in asked] == [200] * 3 and len(entered) == 3


class Body:
    """An app that reads its request to the end, and what it saw."""

    def __init__(self):
        self.reading, self.refused, self.go_on = 0, [], asyncio.Event()

    async def __call__(self, scope, receive, send):
        try:
            while (await receive()).get("more_body"):
                pass
        except ApiError as error:
            self.refused.append(error)
            return
        self.reading += 1
        await self.go_on.wait()
        turn_is_over(scope)
        self.reading -= 1


def scope(*headers):
    return {"type": "http", "headers": list(headers), "path": "/", "method": "POST"}


def body(size):
    parts = [b"x" * (size // 2), b"x" * (size - size // 2)]

    async def receive():
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    return receive


async def test_turns_of_large_bodies(monkeypatch):
    monkeypatch.setattr(large, "PAUSE", 0.0)
    monkeypatch.setattr(large, "REFUSAL", 0.0)
    app, send = Body(), mock.AsyncMock()
    bodies = LargeBodies(app, size=10, waiting=2)
    tasks = [asyncio.create_task(bodies(scope(), body(10), send)) for _ in range(3)]
    tasks.append(asyncio.create_task(bodies(scope(), body(9), send)))
    await asyncio.sleep(0.01)
    assert app.reading == 2, "the first large one, and the small one"
    # the large one's turn alone rests the collector
    assert not gc.isenabled()
    await bodies(scope(), body(10), send)
    assert [error.status_code for error in app.refused] == [429]
    # with its length beforehand, no byte of it is read
    await bodies(scope((b"content-length", b"10")), None, send)
    start, end = (call.args[0] for call in send.call_args_list)
    assert start["status"] == 429 and json.loads(end["body"])["error"]["code"] == "queue_full"
    app.go_on.set()
    await asyncio.gather(*tasks)
    assert app.reading == 0
    await asyncio.sleep(0.01)
    assert gc.isenabled() and not bodies._turn.locked()


async def test_a_turn_ends_with_its_request(monkeypatch):
    monkeypatch.setattr(large, "PAUSE", 0.0)

    async def broken(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        raise RuntimeError("broke")

    bodies = LargeBodies(broken, size=10)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broke"):
            await bodies(scope(), body(10), None)
        assert gc.isenabled()
        await asyncio.sleep(0.01)


PROMPT = "Mary went to the kitchen."


def few(server, prompt=PROMPT, **body):
    return complete(server, prompt=prompt, max_tokens=2, temperature=0, **body)


@pytest.mark.slow
def test_what_the_limits_allow_is_answered_though_the_queue_is_shorter(pocket):
    with served(pocket, ServerSettings(max_prompts=11, max_n=8), limit=3) as server:
        alone = few(server).json()["choices"][0]["text"]
        answer = few(server, [PROMPT] * 11, n=8)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(88))
        assert {choice["text"] for choice in choices} == {alone}
        streamed = few(server, [PROMPT] * 3, n=4, stream=True)
        assert streamed.status_code == 200 and streamed.text.count('"finish_reason": "length"') == 12


def test_a_request_has_no_more_than_its_share_with_the_engine(pocket):
    with served(pocket, ServerSettings(max_at_once=2), limit=3) as server:
        server.service.gate.clear()
        five = begun(server, few, prompt=[PROMPT] * 5)
        until(lambda: len(server.service.tickets) == 2)
        # there is room for others, who need not wait for all five
        other = begun(server, few)
        until(lambda: len(server.service.tickets) == 3)
        server.service.gate.set()
        assert five.result().status_code == other.result().status_code == 200
        assert len(server.service.tickets) == 6 and len(five.result().json()["choices"]) == 5


def test_too_much_that_waits_is_asked_to_come_back_and_leaves_nothing_behind(pocket):
    with served(pocket, ServerSettings(max_at_once=1, max_n=3, max_prompts=1), limit=1) as server:
        server.service.gate.clear()
        answer = begun(server, few, n=3)
        until(lambda: server.service.status().running == 1)
        refused = few(server, n=3)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        until(lambda: server.service.tickets[-1].cancelled)
        server.service.gate.set()
        assert answer.result().status_code == 200 and len(server.service.tickets) == 4
        assert few(server, n=3).status_code == 200, "nothing waits any more"


def test_who_leaves_frees_what_waited(pocket):
    with served(pocket, ServerSettings(max_at_once=1, max_n=3, max_prompts=1), limit=1) as server:
        server.service.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            few(server, n=3, timeout=httpx.Timeout(10, read=0.5))
        until(lambda: server.app.state.handler.open == 0)
        server.service.gate.set()
        assert len(few(server, n=3).json()["choices"]) == 3 and len(server.service.tickets) == 4


def turns_of(backlog, *told):
    """Of a service that takes the first of its jobs, and tells this of those after it."""
    service = mock.Mock(submit=mock.Mock(side_effect=[mock.AsyncMock(), *told]))
    return Turns(service, 2, backlog), service.submit


async def test_those_that_wait_are_counted_once_and_given_back():
    backlog = Backlog(2)
    turns, submit = turns_of(backlog, Busy("full"))
    events = [turns.add(number) for number in range(3)]
    assert submit.call_args_list == [mock.call(0), mock.call(1)] and backlog.waiting == 2
    with pytest.raises(Busy, match="2 choices are waiting"):
        turns.add(3)
    for item in [*events, *events]:
        await item.aclose()
    assert backlog.waiting == 0


async def test_the_end_of_the_service_ends_those_that_wait():
    backlog = Backlog(2)
    turns, _ = turns_of(backlog, Busy("full"), Busy("full"), ShuttingDown("the end"))
    turns.add(0)
    waiting = turns.add(1)
    with pytest.raises(ShuttingDown):
        await anext(waiting)
    assert backlog.waiting == 0
