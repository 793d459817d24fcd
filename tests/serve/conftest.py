import socket
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
import uvicorn

from sigma0.ladder import Always, FidelityLadder, Rung
from sigma0.serve.app import create_app
from sigma0.serve.limits import ServerSettings
from tests.serve.stream_service import StreamService


@contextmanager
def serving(app):
    """A real server; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    # the socket listens already: whoever connects before the app is up waits for it
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


class Served:
    """A served pocket."""

    def __init__(self, service, url, app):
        self.service, self.url, self.app = service, url, app
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@contextmanager
def served(pocket, settings=None, ladder=None, **service_settings):
    service = StreamService(*pocket, **service_settings)
    app = create_app(service, settings or ServerSettings(), ladder)
    with serving(app) as url:
        yield Served(service, url, app)


@pytest.fixture(scope="session")
def plain(pocket):
    """A server without a ladder."""
    with served(pocket) as server:
        yield server


@pytest.fixture(scope="session")
def climbing(pocket):
    """A server whose ladder hands everything up."""
    rungs = [Rung.local(*pocket, "pocket"), Rung.local(*pocket, "above")]
    with served(pocket, ladder=FidelityLadder(rungs, policy=Always())) as server:
        yield server
