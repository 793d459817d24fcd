"""The list of requests in the engine, and how long each waited and ran."""

import asyncio
import threading

import httpx
import pytest

pytest.importorskip("fastapi")

from pydantic import SecretStr

from sigma0.serve.api.access import ServerSettings
from tests.serve.api.test_chat import ASKED, LOST, post
from tests.serve.api.test_load import begin, until
from tests.serve.conftest import served


def slots(server, **headers):
    return httpx.get(f"{server.url}/slots", headers=headers, timeout=60)


def test_what_runs_and_what_waits(pocket):
    with served(pocket, limit=1) as server:
        service = server.service
        assert slots(server).json() == []
        service.held.tokens = threading.Semaphore(3)
        exit_setting = {"mode": "margin", "theta": 0.9, "after_exit": "drop"}
        first, answers = begin(server, sigma0={"exit": exit_setting}, max_tokens=12)
        until(lambda: service.status().tokens == 3)
        second, others = begin(server, messages=LOST, max_tokens=5)
        until(lambda: service.status().waiting)
        told = slots(server)
        running, waiting = told.json()
        (running_ticket, waiting_ticket) = service.tickets
        assert running["id"] != waiting["id"] and running["id"].endswith("-0") and len(running["id"]) == 10
        seconds = running.pop("seconds"), waiting.pop("seconds")
        assert seconds[0] > seconds[1] > 0
        assert running == {
            "id": running["id"],
            "state": "decode",
            "lane": 0,
            "prompt_tokens": len(running_ticket.request.prompt_ids),
            "new_tokens": 3,
            "max_new_tokens": 12,
            "pages": -(-(len(running_ticket.request.prompt_ids) + 3) // 16),
            "exit": "margin",
            "after_exit": "drop",
            "depth": running["depth"],
            "preemptions": 0,
            "engine": None,
        }
        assert 1 <= running["depth"] <= 6
        assert (waiting["state"], waiting["lane"], waiting["pages"], waiting["depth"]) == ("waiting", None, 0, None)
        assert waiting["prompt_tokens"] == len(waiting_ticket.request.prompt_ids) and waiting["new_tokens"] == 0
        # no word of what was asked or written
        assert not any(word in told.text for word in ("Sara", "bedroom", "park", "Once"))
        service.held.tokens.release(1000)
        first.join()
        second.join()
        assert [answer.status_code for answer in answers + others] == [200, 200]
        # the list names requests as the header does, as far as it goes
        assert answers[0].headers["x-request-id"].startswith(running["id"].partition("-")[0])
        assert slots(server).json() == []


def test_a_prompt_that_is_being_read(pocket):
    with served(pocket) as server:
        server.service.gate.clear()
        thread, answers = begin(server, n=2)
        until(lambda: server.service.status().running == 2)
        told = slots(server).json()
        assert [(each["state"], each["lane"], each["id"][-2:]) for each in told] == [
            ("prefill", 0, "-0"),
            ("prefill", 1, "-1"),
        ]
        server.service.gate.set()
        thread.join()
        assert answers[0].status_code == 200


def test_the_list_is_behind_the_key(pocket):
    with served(pocket, ServerSettings(api_key=SecretStr("secret"))) as server:
        assert slots(server).status_code == 401
        assert slots(server, authorization="Bearer secret").json() == []


def test_an_engine_that_does_not_answer_or_is_gone(pocket, monkeypatch):
    monkeypatch.setattr("sigma0.serve.engine.client.LOOKING", 0.05)
    with served(pocket) as server:
        entered, go_on = threading.Event(), threading.Event()

        def stuck():
            entered.set()
            go_on.wait(60)
            return []

        monkeypatch.setattr(server.service.held, "step", stuck)
        thread, _ = begin(server)
        try:
            assert entered.wait(60)
            late = slots(server)
            assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        finally:
            monkeypatch.undo()
            go_on.set()
            thread.join()
        assert slots(server).json() == []
        server.service.close()
        gone = slots(server)
        assert gone.status_code == 503


def test_many_who_ask_at_once_cost_the_engine_one_look(pocket, monkeypatch):
    with served(pocket) as server:
        looked, go_on = [], threading.Event()
        monkeypatch.setattr(server.service.held, "slots", lambda: looked.append(go_on.wait(60)) or ())

        async def run():
            asked = [asyncio.create_task(server.service.slots()) for _ in range(20)]
            await asyncio.sleep(0.05)
            go_on.set()
            return await asyncio.gather(*asked)

        assert asyncio.run(run()) == [()] * 20
        assert len(looked) == 1


def test_times_of_a_request(pocket):
    with served(pocket, limit=1) as server:
        service = server.service
        service.gate.clear()
        first, _ = begin(server)
        until(lambda: service.status().running)
        second, _ = begin(server)
        until(lambda: service.status().waiting)
        ends = []
        finish = service.held._outputs.finish

        def seen(state, work):
            ends.append(finish(state, work))
            return ends[-1]

        service.held._outputs.finish = seen
        service.gate.set()
        first.join()
        second.join()
    one, other = (end.times for end in ends)
    assert min(*one, *other) >= 0
    # the second one waited for all of the first one's passes
    assert other.queue >= one.decode > 0 and one.queue < other.queue


def test_a_request_that_was_asked_of_by_name_only_is_the_same(plain):
    """The id that a slot shows is no part of the answer."""
    found = [post(plain, messages=ASKED, temperature=0.7, seed=3).json()["choices"] for _ in range(2)]
    assert found[0] == found[1]
