"""The same faults where the server runs as it does for users of ladders: threads, a real server, real connections.

Which call fails depends on how threads take turns, so that runs differ; what has to hold does not.
"""

import asyncio
import logging
import threading
from unittest.mock import patch

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")


import sigma0.ladder.endpoint
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.connections import ExhaustionLog, protocol_of
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from tests.serve.api.test_load import until
from tests.serve.conftest import serving
from tests.serve.faults import POINTS, Client, Endpoint, Fault
from tests.serve.mixed_run import AFTERWARDS, AT_ONCE, LIMITS, Bench, held_by, mixed, outcome_of

SETTINGS = ServerSettings(request_timeout=600.0)


class Wire:
    """A transport whose writes are a point: one that fails ends its connection, as the event loop's own do."""

    def __init__(self, transport):
        self._transport, self._client = transport, Client()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        try:
            self._client.write({})
        except OSError:
            self._transport.abort()
        else:
            self._transport.write(data)


class WiredProtocol(protocol_of(SETTINGS, ExhaustionLog())):
    """Writes through a `Wire`."""

    def connection_made(self, transport):
        super().connection_made(Wire(transport))


async def ask(client, asked):
    """What a client of a real connection sees; None where it has left."""
    try:
        async with client.stream("POST", asked.path, json=asked.body) as response:
            if asked.leaves is not None:
                return None
            body = await response.aread()
    except httpx.TransportError:
        return "broken"
    start = {"type": "http.response.start", "status": response.status_code}
    return outcome_of([start, {"type": "http.response.body", "body": body}], bool(asked.body.get("stream")))


async def ask_all(url, fault):
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(asked):
            async with places:
                return await ask(client, asked)

        fault.armed = True
        outcomes = await asyncio.gather(*(one(asked) for asked in mixed()))
        fault.armed = False
        return outcomes, await ask(client, AFTERWARDS), (await client.get("/health")).status_code


def run(bench, fault):
    """Outcomes of the mixed run, of a request afterwards, and what is held."""
    engine = Engine(bench.model, bench.tokenizer, "tiny", LIMITS, watch=True)
    service = EngineService(engine, threads=1)
    app = create_app(service, SETTINGS, bench.ladder)
    with fault.installed(), patch.object(sigma0.ladder.endpoint.Asker, "_open", lambda self, *_: Endpoint()):
        try:
            with serving(app, http=WiredProtocol) as url:
                outcomes, after, health = asyncio.run(ask_all(url, fault))
                until(lambda: not held_by(engine, app))
        finally:
            service.close()
    return outcomes, after, health


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.fixture(scope="module")
def clean(bench):
    return run(bench, Fault("step"))


def case(point, at, fast=False):
    return pytest.param(point, at, marks=() if fast else pytest.mark.exhaustive)


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize(
    "point, at",
    [
        case("socket", 60, fast=True),
        *(case("socket", at) for at in (1, 20, 40, 80, 100)),
        case("tokeniser", 200, fast=True),
        *(case("tokeniser", at) for at in (2, 50, 400)),
        case("step", 300, fast=True),
        *(case("step", at) for at in (1, 2, 30, 700)),
        *(case("page", at) for at in (1, 20, 300)),
        *(case("grammar", at) for at in (1, 20, 60, 100)),
        *(case("template", at) for at in (1, 30)),
        *(case("endpoint", at) for at in (1, 12)),
    ],
)
def test_a_fault(bench, clean, point, at):
    logging.disable(logging.CRITICAL)
    threads = set(threading.enumerate())
    fault = Fault(point, at)
    try:
        outcomes, after, health = run(bench, fault)
    finally:
        logging.disable(logging.NOTSET)
    assert fault.calls >= at
    harmed = [(outcome, expected) for outcome, expected in zip(outcomes, clean[0], strict=True) if outcome != expected]
    for outcome, expected in harmed:
        if outcome == "broken":
            assert point == "socket"
        else:
            assert outcome.code == "internal_error" and all(map(str.startswith, expected.texts, outcome.texts))
    assert len(harmed) <= (0 if point == "endpoint" else 1 if POINTS[point].alone else AT_ONCE), harmed
    assert (after, health) == clean[1:] and health == 200
    # threads of a pool end once they have nothing to do
    until(lambda: not set(threading.enumerate()) - threads)
