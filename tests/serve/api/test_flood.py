"""A flood of large requests: what never fits is not tokenized, and others are answered meanwhile."""

import asyncio
import gc
import json
import threading

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from sigma0.serve.api import large
from sigma0.serve.api import requests as planning
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.errors import ApiError
from sigma0.serve.api.large import LARGE, LargeBodies, turn_is_over
from sigma0.serve.api.requests import RequestParser
from tests.serve.api.test_chat import post
from tests.serve.api.test_load import until
from tests.serve.conftest import served

WORD = "Mary went to the kitchen. "
MEGABYTE = 2**20 - 200


def complete(server, prompt, **body):
    return httpx.post(f"{server.url}/v1/completions", json={"model": "pocket", "prompt": prompt, **body}, timeout=60)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": WORD * (MEGABYTE // len(WORD))}]},
        {"messages": [{"role": "user", "content": "hi you"}] * (MEGABYTE // 40)},
        {"messages": [{"role": "user", "content": ""}] * 2000},
        {"prompt": WORD * (MEGABYTE // len(WORD))},
        {"prompt": ["short", "\U0001f600" * (MEGABYTE // 12)]},
        {"prompt": [5] * (MEGABYTE // 3)},
        {"prompt": [[5], [5] * 2049]},
    ],
    ids=["text", "many messages", "empty messages", "completion", "the second", "ids", "lists of ids"],
)
def test_what_never_fits_is_refused_by_its_length_alone(plain, monkeypatch, body):
    tokenized = []
    encode = planning.encode

    def seen(tokenizer, prompt, *more):
        tokenized.append(prompt)
        return encode(tokenizer, prompt, *more)

    monkeypatch.setattr(planning, "encode", seen)
    answer = post(plain, **body) if "messages" in body else complete(plain, body["prompt"])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "limit of 2048" in error["message"]
    assert tokenized in ([], ["short"])


def test_what_may_fit_is_tokenized(plain, monkeypatch):
    """As many of the longest tokens as fit are the longest text that may."""
    tokenized = []
    monkeypatch.setattr(
        planning, "encode", lambda tokenizer, prompt, *more: tokenized.append(prompt) or [torch.ones(9)]
    )
    longest = len("<|endoftext|>")
    for size, is_tokenized in ((2048 * longest, True), (2048 * longest + 1, False)):
        answer = complete(plain, "x" * size, max_tokens=1)
        assert bool(tokenized) == is_tokenized, answer.text
        tokenized.clear()


def test_a_servers_own_limit_of_a_prompt_counts(pocket, monkeypatch):
    monkeypatch.setattr(planning, "encode", None)
    with served(pocket, ServerSettings(max_prompt_tokens=5)) as server:
        answer = complete(server, "x" * 66)
        assert answer.status_code == 400 and "limit of 5" in answer.json()["error"]["message"]
        assert "over 65 fits" in answer.json()["error"]["message"]


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
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(post(server, **big))) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: entered)
            assert post(server).status_code == 200 and len(entered) == 1
        finally:
            go_on.set()
            for thread in threads:
                thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3 and len(entered) == 3


def test_too_many_that_are_tokenized_are_asked_to_come_back(pocket, monkeypatch):
    entered, go_on, plan = threading.Event(), threading.Event(), RequestParser.parse

    def slow(planner, body):
        entered.set()
        go_on.wait(60)
        return plan(planner, body)

    monkeypatch.setattr(RequestParser, "parse", slow)
    with served(pocket, ServerSettings(max_parsing=1)) as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(server)))
        thread.start()
        assert entered.wait(60)
        try:
            refused = post(server)
        finally:
            go_on.set()
            thread.join()
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert answers[0].status_code == 200 and post(server).status_code == 200


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


def test_turns_of_large_bodies(monkeypatch):
    monkeypatch.setattr(large, "PAUSE", 0.0)
    monkeypatch.setattr(large, "REFUSAL", 0.0)

    async def run():
        app, sent = Body(), []
        bodies = LargeBodies(app, size=10, waiting=2)

        async def send(message):
            sent.append(message)

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
        assert sent[0]["status"] == 429 and json.loads(sent[1]["body"])["error"]["code"] == "queue_full"
        app.go_on.set()
        await asyncio.gather(*tasks)
        assert app.reading == 0
        await asyncio.sleep(0.01)
        assert gc.isenabled() and not bodies._turn.locked()

    asyncio.run(run())


def test_a_turn_ends_with_its_request(monkeypatch):
    monkeypatch.setattr(large, "PAUSE", 0.0)

    async def broken(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        raise RuntimeError("broke")

    async def run():
        bodies = LargeBodies(broken, size=10)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broke"):
                await bodies(scope(), body(10), None)
            assert gc.isenabled()
            await asyncio.sleep(0.01)

    asyncio.run(run())
