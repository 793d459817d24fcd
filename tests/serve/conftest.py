"""Real servers on loopback, a real client, and a browser."""

import inspect
import shutil
import socket
import threading
from contextlib import closing, contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
import uvicorn

from sigma0.ladder import Always, FidelityLadder, Rung
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.connections import Server
from tests.serve.engine.spied_worker import SpiedService
from tests.serve.page.page_server import PageServer


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj):
    """Asynchronous tests are run by the plugin of anyio."""
    if inspect.iscoroutinefunction(obj):
        pytest.mark.anyio(obj)


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@contextmanager
def running(server, listener=None):
    """A uvicorn server in a thread; its port."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    # the socket listens already: whoever connects before the app is up waits for it
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def serving(app, **settings):
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2, **settings)
    with running(uvicorn.Server(config)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def commanded(pocket, **settings):
    """The server of the command, in a thread; its port, and itself."""
    service, known = SpiedService(*pocket), ServerSettings(**settings)
    server = Server(create_app(service, known), service, known)
    with closing(service), running(server) as port:
        yield port, server


def held_up(function, which=lambda *asked: True):
    """A function whose calls wait where `which` says so; an event that one has come, and one that lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*asked):
        if which(*asked):
            begun.set()
            assert go_on.wait(60)
        return function(*asked)

    return slow, begun, go_on


def two_rungs(pocket, above=None):
    """A ladder's rungs: the model, and above it itself or another one of the same kind."""
    return [Rung.local(*pocket, "pocket"), Rung.local(above or pocket[0], pocket[1], "above")]


class Served:
    def __init__(self, service, url, app):
        self.service, self.url, self.app = service, url, app
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@contextmanager
def served(pocket, settings=None, ladder=None, **service_settings):
    with closing(SpiedService(*pocket, **service_settings)) as service:
        app = create_app(service, settings or ServerSettings(), ladder)
        with serving(app) as url:
            yield Served(service, url, app)


@pytest.fixture(scope="session")
def plain(pocket):
    """A server without a ladder, which has read the question of most tests before: else the first to ask differs."""
    from tests.serve.api.test_chat import ASKED

    with served(pocket) as server:
        server.client.chat.completions.create(model="pocket", messages=ASKED, max_tokens=20)
        yield server


@pytest.fixture(scope="session")
def climbing(pocket):
    """A server whose ladder hands everything up."""
    with served(pocket, ladder=FidelityLadder(two_rungs(pocket), policy=Always())) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    # no longer than its tests: while it is open, no other event loop can run in this thread
    playwright = pytest.importorskip("playwright.sync_api")
    result = shutil.which("chromium") or shutil.which("chromium-browser")
    if not result:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=result, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def server():
    serving = PageServer()
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()
    thread.join()


@pytest.fixture
def page(browser, server):
    """The page, not yet opened; what its console complains of fails the test unless it is taken from `complaints`."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    opened.complaints = []
    opened.on("console", lambda said: said.type in ("error", "warning") and opened.complaints.append(said.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    yield opened
    context.close()
    assert opened.complaints == []
