"""Requests of more choices than the queue holds are taken as a whole, and keep none of it from others."""

import asyncio
import threading

import httpx
import pytest

pytest.importorskip("fastapi")

from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.turns import Backlog, Turns
from sigma0.serve.engine.messages import Busy, ShuttingDown
from tests.serve.api.test_load import until
from tests.serve.conftest import served

SHORT = {"model": "pocket", "max_tokens": 2, "temperature": 0}
PROMPT = "Mary went to the kitchen."


def complete(server, **body):
    return httpx.post(f"{server.url}/v1/completions", json={**SHORT, "prompt": PROMPT, **body}, timeout=60)


def begun(server, **body):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(server, **body)))
    thread.start()
    return thread, answers


@pytest.mark.slow
def test_what_the_limits_allow_is_answered_though_the_queue_is_shorter(pocket):
    with served(pocket, ServerSettings(max_prompts=11, max_n=8), limit=3) as server:
        alone = complete(server).json()["choices"][0]["text"]
        answer = complete(server, prompt=[PROMPT] * 11, n=8)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(88))
        assert {choice["text"] for choice in choices} == {alone}
        streamed = complete(server, prompt=[PROMPT] * 3, n=4, stream=True)
        assert streamed.status_code == 200 and streamed.text.count('"finish_reason": "length"') == 12


def test_what_they_do_not_allow_is_refused_with_the_number(pocket):
    with served(pocket, ServerSettings(max_prompts=2, max_n=2), limit=1) as server:
        for body, told in (
            ({"n": 3}, "at most 2 choices, got 3"),
            ({"prompt": [PROMPT] * 3}, "at most 2 at once, got 3"),
        ):
            answer = complete(server, **body)
            assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_a_request_has_no_more_than_its_share_with_the_engine(pocket):
    with served(pocket, ServerSettings(max_at_once=2), limit=3) as server:
        server.service.gate.clear()
        thread, answers = begun(server, prompt=[PROMPT] * 5)
        until(lambda: len(server.service.tickets) == 2)
        # there is room for others, who need not wait for all five
        other, others = begun(server)
        until(lambda: len(server.service.tickets) == 3)
        server.service.gate.set()
        thread.join()
        other.join()
        assert [each.status_code for each in answers + others] == [200, 200]
        assert len(server.service.tickets) == 6 and len(answers[0].json()["choices"]) == 5


def test_too_much_that_waits_is_asked_to_come_back_and_leaves_nothing_behind(pocket):
    with served(pocket, ServerSettings(max_at_once=1, max_n=3, max_prompts=1), limit=1) as server:
        server.service.gate.clear()
        thread, answers = begun(server, n=3)
        until(lambda: server.service.status().running == 1)
        refused = complete(server, n=3)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        until(lambda: server.service.tickets[-1].cancelled)
        server.service.gate.set()
        thread.join()
        assert answers[0].status_code == 200 and len(server.service.tickets) == 4
        assert complete(server, n=3).status_code == 200, "nothing waits any more"


def test_who_leaves_frees_what_waited(pocket):
    with served(pocket, ServerSettings(max_at_once=1, max_n=3, max_prompts=1), limit=1) as server:
        server.service.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions",
                json={**SHORT, "prompt": PROMPT, "n": 3},
                timeout=httpx.Timeout(10, read=0.5),
            )
        until(lambda: server.app.state.handler.open == 0)
        server.service.gate.set()
        assert len(complete(server, n=3).json()["choices"]) == 3 and len(server.service.tickets) == 4


class Events:
    def __init__(self):
        self.closed = False

    async def aclose(self):
        self.closed = True


class Service:
    """Has room for so many jobs, or is being shut down."""

    def __init__(self, room):
        self.room, self.taken = room, []

    def submit(self, job):
        if isinstance(self.room, Exception):
            raise self.room
        if len(self.taken) >= self.room:
            raise Busy("full")
        self.taken.append(job)
        return Events()


def test_the_first_job_is_refused_where_there_is_no_room():
    backlog = Backlog(5)
    with pytest.raises(Busy, match="full"):
        Turns(Service(0), 2, backlog).add("job")
    with pytest.raises(ShuttingDown):
        Turns(Service(ShuttingDown("no")), 2, backlog).add("job")
    assert backlog.waiting == 0


def test_those_that_wait_are_counted_once_and_given_back():
    async def run():
        service, backlog = Service(1), Backlog(2)
        turns = Turns(service, 2, backlog)
        events = [turns.add(number) for number in range(3)]
        assert service.taken == [0] and backlog.waiting == 2
        with pytest.raises(Busy, match="2 choices are waiting"):
            turns.add(3)
        for each in [*events, *events]:
            await each.aclose()
        assert backlog.waiting == 0

    asyncio.run(run())


def test_the_end_of_the_service_ends_those_that_wait():
    async def run():
        service, backlog = Service(1), Backlog(2)
        turns = Turns(service, 2, backlog)
        turns.add(0)
        waiting = turns.add(1)
        pulled = asyncio.ensure_future(waiting.__anext__())
        await asyncio.sleep(0)
        service.room = ShuttingDown("the end")
        with pytest.raises(ShuttingDown):
            await pulled
        assert backlog.waiting == 0

    asyncio.run(run())
