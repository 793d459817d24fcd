"""The engine after an event loop: many at once, cancelled, refused, drained, broken."""

import asyncio
from contextlib import closing
from unittest import mock

import pytest

from sigma0 import ExitConfig
from sigma0.decode.grammar.spec import Choice
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import Busy, EngineLimits, EngineRequest, RequestFailed, RequestOutput, Unavailable
from tests.serve.conftest import held_up
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import ask

LIMITS = EngineLimits(4, 8, kv_bytes=KV)
STORY = "Mary went to the kitchen. John went to the garden. Where is Mary?"


@pytest.fixture
def service(pocket):
    with closing(EngineService(Engine(*pocket, "pocket", LIMITS, watch=True))) as made:
        yield made


def job(pocket, new=12, **settings):
    ids = tuple(pocket[1](STORY)["input_ids"])
    return EngineRequest(ids, new, **{"exit_config": ExitConfig(q=0.6), **settings})


def yes_or_no(pocket, **settings):
    return job(pocket, grammar=Choice(("yes", "no")), **settings)


def endless(pocket, new=200):
    """A job that does not come to an end by itself: its end is not the likeliest id for long."""
    ids = tuple(pocket[1](STORY)["input_ids"])[:6]
    return EngineRequest(ids, new, ExitConfig(mode="full"))


async def collect(events):
    return [event async for event in events]


async def collect_one(service, request):
    return await collect(service.submit(request))


LONG = "Mary went to the kitchen. " * 100


def test_long_contexts_are_looked_through_elsewhere(service, pocket, monkeypatch):
    """The engine's thread looks nothing up in them, and says what it would have said."""
    request = job(pocket, context=(STORY, LONG))
    expected = ask(Engine(*pocket, "pocket", LIMITS, watch=True), request)[-1]
    monkeypatch.setattr("sigma0.serve.engine.engine.look_up", None)
    *_, done = asyncio.run(collect_one(service, request))
    assert done == expected and done.verdict.grounded == 1.0
    # another process takes over where it is killed
    service._loop._grounding._connection.send_bytes(b"no JSON")
    *_, again = asyncio.run(collect_one(service, request))
    assert again.verdict == done.verdict


async def test_a_request_is_cancelled_or_drained_while_it_is_judged(service, pocket, monkeypatch):
    slow, begun, go_on = held_up(lambda *_: 0.5)
    monkeypatch.setattr("sigma0.serve.engine.loop.GroundingProcess.score", slow)
    request = job(pocket, context=(STORY, LONG))
    gone, kept = service.submit(request), service.submit(request)
    await asyncio.to_thread(begun.wait, 60)
    await gone.aclose()
    # others go on meanwhile
    *_, other = await collect_one(service, job(pocket))
    assert isinstance(other, RequestOutput)
    draining = asyncio.ensure_future(service.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    go_on.set()
    *_, done = await collect(kept)
    await draining
    assert done.verdict.grounded == 0.5


def test_what_cannot_run_is_a_value_error(service, pocket):
    with pytest.raises(ValueError, match="exceed the model's context"):
        asyncio.run(collect_one(service, job(pocket, 10_000)))


async def test_a_pass_that_breaks_ends_what_was_under_way_and_nothing_else(service, pocket, monkeypatch):
    events = service.submit(endless(pocket))
    await anext(events)
    with monkeypatch.context() as patched:
        patched.setattr(service._engine._batch, "run", mock.Mock(side_effect=RuntimeError("out of memory, say")))
        with pytest.raises(RequestFailed, match="RuntimeError in the engine"):
            await collect(events)
    result = await collect_one(service, job(pocket))
    assert isinstance(result[-1], RequestOutput)


@pytest.mark.parametrize("breaks", ["submit", "compile"])
async def test_a_job_that_breaks_as_it_begins_fails_alone(service, pocket, monkeypatch, breaks):
    with monkeypatch.context() as patched:
        patched.setattr(service._engine, breaks, mock.Mock(side_effect=RuntimeError("no memory for its ids, say")))
        with pytest.raises(RequestFailed, match="RuntimeError as this request began"):
            await collect_one(service, yes_or_no(pocket))
    result = await asyncio.wait_for(collect_one(service, yes_or_no(pocket)), 20)
    assert result[-1].text in ("yes", "no")


async def test_jobs_that_are_just_being_taken_in_count_as_waiting(pocket, monkeypatch):
    """Else one too many is taken, and told only later that there is no room."""
    engine = Engine(*pocket, "pocket", EngineLimits(1, 1, kv_bytes=KV), watch=True)
    slow, begun, go_on = held_up(engine.submit)
    monkeypatch.setattr(engine, "submit", slow)
    with closing(EngineService(engine)) as service:
        taken = [service.submit(job(pocket)), service.submit(job(pocket))]
        await asyncio.to_thread(begun.wait, 60)
        try:
            with pytest.raises(Busy):
                service.submit(job(pocket))
        finally:
            go_on.set()
        result = await asyncio.gather(*(collect(events) for events in taken))
        assert all(isinstance(events[-1], RequestOutput) for events in result)


def test_no_room_in_the_engine_is_told_as_such(service, pocket, monkeypatch):
    monkeypatch.setattr(service._engine, "submit", mock.Mock(side_effect=Busy("9 requests are waiting already")))
    with pytest.raises(Busy, match="9 requests"):
        asyncio.run(collect_one(service, job(pocket)))


@pytest.fixture
def compiling(service, monkeypatch):
    """A service whose grammars are not compiled before `go_on`; `begun` says that one is to be."""
    slow, begun, go_on = held_up(service._engine.compile, lambda request: request.grammar is not None)
    monkeypatch.setattr(service._engine, "compile", slow)
    yield begun, go_on
    go_on.set()


async def test_others_go_on_while_a_grammar_is_compiled(service, pocket, compiling):
    begun, go_on = compiling
    waiting = service.submit(yes_or_no(pocket))
    await asyncio.to_thread(begun.wait, 60)
    other = await collect_one(service, job(pocket))
    # it counts as waiting meanwhile
    assert service.status().waiting == 1 and isinstance(other[-1], RequestOutput)
    go_on.set()
    result = await collect(waiting)
    assert result[-1].text in ("yes", "no")


async def test_a_request_is_cancelled_while_its_grammar_is_compiled(service, pocket, compiling):
    begun, go_on = compiling
    waiting = service.submit(yes_or_no(pocket))
    await asyncio.to_thread(begun.wait, 60)
    await waiting.aclose()
    go_on.set()
    await collect_one(service, yes_or_no(pocket))
    status = service.status()
    assert (status.running, status.waiting, status.blocks_used) == (0, 0, 0)


async def test_draining_waits_for_a_grammar_and_closing_does_not(pocket, service, compiling):
    begun, _ = compiling
    waiting = asyncio.ensure_future(collect_one(service, yes_or_no(pocket)))
    await asyncio.to_thread(begun.wait, 60)
    draining = asyncio.ensure_future(service.drain())
    await asyncio.sleep(0.1)
    assert not draining.done() and service.is_up
    service.close()
    with pytest.raises(RequestFailed, match="shut down"):
        await waiting
    await draining


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_that_cannot_be_emptied_ends_the_service(service, pocket, monkeypatch):
    """Else requests would be taken that nobody answers."""
    broken = mock.Mock(side_effect=RuntimeError("the device is lost, say"))
    events = service.submit(endless(pocket))
    await anext(events)
    monkeypatch.setattr(service._engine, "reset", broken)
    monkeypatch.setattr(service._engine._batch, "run", broken)
    with pytest.raises(Unavailable, match="has ended"):
        await collect(events)
    assert not service.is_up
    with pytest.raises(Unavailable):
        service.submit(job(pocket))
