"""The engine behind an event loop: many at once, cancelled, refused, drained, broken."""

import asyncio
import threading

import pytest

from sigma0 import ExitConfig
from sigma0.decode.grammar.spec import Choice
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import (
    Busy,
    EngineLimits,
    EngineRequest,
    RequestFailed,
    RequestOutput,
    TokenOutput,
    Unavailable,
)
from tests.serve.engine.spied_worker import KV
from tests.serve.engine.test_engine import ask

LIMITS = EngineLimits(4, 8, kv_bytes=KV)
STORY = "Mary went to the kitchen. John went to the garden. Where is Mary?"


def opened(pocket, limits=LIMITS):
    return EngineService(Engine(*pocket, "pocket", limits, watch=True))


@pytest.fixture
def service(pocket):
    made = opened(pocket)
    yield made
    made.close()


def job(pocket, new=12, **settings):
    return EngineRequest(
        tuple(pocket[1](STORY)["input_ids"]), new, settings.pop("exit_config", ExitConfig(q=0.6)), **settings
    )


def endless(pocket, new=200):
    """A job that does not come to an end by itself: its end is not the likeliest id for long."""
    ids = tuple(pocket[1](STORY)["input_ids"])[:6]
    return EngineRequest(ids, new, ExitConfig(mode="full"))


async def collect(events):
    return [event async for event in events]


async def collect_one(service, request):
    return await collect(service.submit(request))


def test_tokens_come_then_the_end(service, pocket):
    events = asyncio.run(collect_one(service, job(pocket)))
    assert all(isinstance(event, TokenOutput) for event in events[:-1]) and isinstance(events[-1], RequestOutput)
    assert "".join(event.text for event in events[:-1]) == events[-1].text == " Mary is in the kitchen."


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


def test_a_request_is_cancelled_or_drained_while_it_is_judged(service, pocket, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def wait(self, text, context):
        begun.set()
        assert go.wait(60)
        return 0.5

    monkeypatch.setattr("sigma0.serve.engine.loop.GroundingProcess.score", wait)
    request = job(pocket, context=(STORY, LONG))

    async def run():
        gone, kept = service.submit(request), service.submit(request)
        while not begun.is_set():
            await asyncio.sleep(0.01)
        await gone.aclose()
        # others go on meanwhile
        *_, other = await collect_one(service, job(pocket))
        assert isinstance(other, RequestOutput)
        draining = asyncio.ensure_future(service.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        go.set()
        *_, done = await collect(kept)
        await draining
        return done

    assert asyncio.run(run()).verdict.grounded == 0.5


def test_many_at_once_are_told_apart(service, pocket):
    async def run():
        return await asyncio.gather(*(collect(service.submit(job(pocket, new))) for new in range(1, 9)))

    told = asyncio.run(run())
    assert [len(events) - 1 for events in told] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert service.status().blocks_used == 0


@pytest.mark.parametrize("read", [True, False])
def test_a_closed_iterator_frees_what_it_held(service, pocket, read):
    async def run():
        events = service.submit(endless(pocket))
        if read:
            assert isinstance(await anext(events), TokenOutput)
        await events.aclose()
        # the next job comes behind the cancellation
        await collect(service.submit(job(pocket, 1)))
        return service.status()

    status = asyncio.run(run())
    assert status.running == 0 and status.blocks_used == 0 and status.tokens < 100


def test_a_full_queue_is_told_at_once(service, pocket):
    async def run():
        taken = [service.submit(endless(pocket)) for _ in range(8)]
        with pytest.raises(Busy, match="waiting already"):
            taken += [service.submit(endless(pocket)) for _ in range(64)]
        for events in taken:
            await events.aclose()

    asyncio.run(run())


def test_what_cannot_run_is_a_value_error(service, pocket):
    with pytest.raises(ValueError, match="exceed the model's context"):
        asyncio.run(collect_one(service, job(pocket, 10_000)))


def test_draining_finishes_what_was_taken(service, pocket):
    async def run():
        asked = [asyncio.ensure_future(collect(service.submit(job(pocket)))) for _ in range(5)]
        await asyncio.sleep(0)
        await service.drain()
        with pytest.raises(Busy, match="shut down"):
            service.submit(job(pocket))
        return await asyncio.gather(*asked)

    assert all(isinstance(events[-1], RequestOutput) for events in asyncio.run(run()))


def test_a_pass_that_breaks_ends_what_was_under_way_and_nothing_else(service, pocket, monkeypatch):
    async def run():
        events = service.submit(endless(pocket))
        await anext(events)
        with monkeypatch.context() as patched:
            patched.setattr(service._engine._batch, "run", broken)
            with pytest.raises(RequestFailed, match="RuntimeError in the engine"):
                await collect(events)
        return await collect(service.submit(job(pocket)))

    def broken():
        raise RuntimeError("out of memory, say")

    assert isinstance(asyncio.run(run())[-1], RequestOutput)


def test_closing_fails_what_is_under_way(service, pocket):
    async def run():
        events = service.submit(endless(pocket))
        await anext(events)
        assert service.is_up and service.engines() == {}
        service.close()
        assert not service.is_up
        with pytest.raises(RequestFailed, match="shut down"):
            await collect(events)

    asyncio.run(run())


def test_a_job_that_breaks_as_it_begins_fails_alone(service, pocket, monkeypatch):
    def broken(*asked):
        raise RuntimeError("no memory for its ids, say")

    async def run():
        with monkeypatch.context() as patched:
            patched.setattr(service._engine, "submit", broken)
            with pytest.raises(RequestFailed, match="RuntimeError as this request began"):
                await collect(service.submit(job(pocket)))
        return await asyncio.wait_for(collect(service.submit(job(pocket))), 20)

    assert isinstance(asyncio.run(run())[-1], RequestOutput)


def test_jobs_that_are_just_being_taken_in_count_as_waiting(pocket, monkeypatch):
    """Else one too many is taken, and told only later that there is no room."""
    service = opened(pocket, EngineLimits(1, 1, kv_bytes=KV))
    begun, go_on, submit = threading.Event(), threading.Event(), service._engine.submit

    def slow(*asked):
        begun.set()
        go_on.wait(60)
        return submit(*asked)

    async def run():
        taken = [service.submit(job(pocket)), service.submit(job(pocket))]
        await asyncio.to_thread(begun.wait, 60)
        try:
            with pytest.raises(Busy):
                service.submit(job(pocket))
        finally:
            go_on.set()
        return await asyncio.gather(*(collect(events) for events in taken))

    monkeypatch.setattr(service._engine, "submit", slow)
    try:
        assert all(isinstance(events[-1], RequestOutput) for events in asyncio.run(run()))
    finally:
        service.close()


def test_no_room_in_the_engine_is_told_as_such(service, pocket, monkeypatch):
    def full(*asked):
        raise Busy("9 requests are waiting already")

    monkeypatch.setattr(service._engine, "submit", full)
    with pytest.raises(Busy, match="9 requests"):
        asyncio.run(collect_one(service, job(pocket)))


@pytest.fixture
def compiling(service, monkeypatch):
    """A service whose grammars are not compiled before `go_on`; `begun` says that one is to be."""
    begun, go_on, compile_ = threading.Event(), threading.Event(), service._engine.compile

    def slow(request):
        if request.grammar is not None:
            begun.set()
            assert go_on.wait(60)
        return compile_(request)

    monkeypatch.setattr(service._engine, "compile", slow)
    yield begun, go_on
    go_on.set()


def yes_or_no(pocket, **settings):
    return job(pocket, grammar=Choice(("yes", "no")), **settings)


def test_others_go_on_while_a_grammar_is_compiled(service, pocket, compiling):
    begun, go_on = compiling

    async def run():
        waiting = service.submit(yes_or_no(pocket))
        await asyncio.to_thread(begun.wait, 60)
        other = await collect(service.submit(job(pocket)))
        # it counts as waiting meanwhile
        assert service.status().waiting == 1 and isinstance(other[-1], RequestOutput)
        go_on.set()
        return await collect(waiting)

    assert asyncio.run(run())[-1].text in ("yes", "no")


def test_a_request_is_cancelled_while_its_grammar_is_compiled(service, pocket, compiling):
    begun, go_on = compiling

    async def run():
        waiting = service.submit(yes_or_no(pocket))
        await asyncio.to_thread(begun.wait, 60)
        await waiting.aclose()
        go_on.set()
        await collect(service.submit(yes_or_no(pocket)))
        return service.status()

    status = asyncio.run(run())
    assert (status.running, status.waiting, status.blocks_used) == (0, 0, 0)


def test_draining_waits_for_a_grammar_and_closing_does_not(pocket, service, compiling):
    begun, _ = compiling

    async def run():
        waiting = asyncio.ensure_future(collect(service.submit(yes_or_no(pocket))))
        await asyncio.to_thread(begun.wait, 60)
        draining = asyncio.ensure_future(service.drain())
        await asyncio.sleep(0.1)
        assert not draining.done() and service.is_up
        service.close()
        with pytest.raises(RequestFailed, match="shut down"):
            await waiting
        await draining

    asyncio.run(run())


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(service, pocket, monkeypatch):
    def broken(request):
        raise RuntimeError("an engine of grammars that breaks")

    async def run():
        with monkeypatch.context() as patched:
            patched.setattr(service._engine, "compile", broken)
            with pytest.raises(RequestFailed, match="RuntimeError as this request began"):
                await collect(service.submit(yes_or_no(pocket)))
        return await collect(service.submit(yes_or_no(pocket)))

    assert asyncio.run(run())[-1].text in ("yes", "no")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_be_emptied_ends_the_service(service, pocket, monkeypatch):
    """Else requests would be taken that nobody answers."""

    def broken():
        raise RuntimeError("the device is lost, say")

    async def run():
        events = service.submit(endless(pocket))
        await anext(events)
        monkeypatch.setattr(service._engine, "reset", broken)
        monkeypatch.setattr(service._engine._batch, "run", broken)
        with pytest.raises(Unavailable, match="has ended"):
            await collect(events)
        assert not service.is_up
        with pytest.raises(Unavailable):
            service.submit(job(pocket))

    asyncio.run(run())
