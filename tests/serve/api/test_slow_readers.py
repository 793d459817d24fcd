"""Clients that read slowly: one event for many tokens, little written ahead; long answers are written in a thread."""

import asyncio
import json
import socket
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sigma0.decode.logits import Alternative
from sigma0.serve.api import handlers as answering
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import create_app
from sigma0.serve.api.events import RunningChoices
from sigma0.serve.api.responses import encoded
from sigma0.serve.engine.messages import RequestOutput, TokenOutput
from sigma0.signals.savings import savings
from tests.serve.api.test_chat import ASKED, lines, post
from tests.serve.api.test_connections import rest
from tests.serve.api.test_load import until
from tests.serve.conftest import running, served
from tests.serve.engine.spied_worker import SpiedService

LENGTH = 3000
# of the kernel, at both ends, so that a client that does not read is felt early; the kernel doubles them
SOCKET = 4096
# above which asyncio and uvloop hold a writer up
HIGH_WATER = 2**16


def written(alternatives):
    others = tuple(Alternative(5 + place, -2.0 - place) for place in range(alternatives or 0))
    logprob = None if alternatives is None else -0.5
    return tuple(
        TokenOutput(number, f" {number}", 1 + number % 6, "gate", None, 0.5, 0.25, 1.0, logprob, others, "pocket")
        for number in range(LENGTH)
    )


class Scripted(SpiedService):
    """A service that has written its answers before they are asked for, and tells them faster than anybody reads."""

    def __init__(self, *args):
        super().__init__(*args)
        self.over = threading.Event()

    async def submit(self, request):
        depths = [1 + number % 6 for number in range(LENGTH)]
        tokens, text = written(request.logprobs), "".join(f" {number}" for number in range(LENGTH))
        saved = savings([depths], sum(depths), 6 * LENGTH, 6)
        for token in tokens:
            # one a turn of the loop, as from an engine
            await asyncio.sleep(0)
            yield token
        # the last one is asked for once all others were taken
        self.over.set()
        yield RequestOutput(text, tokens, "length", 3, 0, 6, sum(depths), 6 * LENGTH, saved, None, None, None)


class Transports(AutoHTTPProtocol):
    """Keeps what the last connection writes to."""

    last = None

    def connection_made(self, transport):
        type(self).last = transport
        super().connection_made(transport)


@contextmanager
def scripted(pocket, loop, settings):
    """A real server, its service, and how much was written ahead after each message."""
    service, ahead = Scripted(*pocket), []
    app = service.app = create_app(service, settings)

    async def seen(scope, receive, send):
        async def watched(message):
            await send(message)
            ahead.append(Transports.last.get_write_buffer_size())

        await app(scope, receive, watched if scope["type"] == "http" else send)

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(seen, log_level="error", timeout_graceful_shutdown=2, http=Transports, loop=loop)
    with closing(service), running(uvicorn.Server(config), listener):
        yield service, listener.getsockname(), ahead


def ask(address, **body):
    """A connection on which a request was sent, and that reads nothing by itself."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET)
    connection.settimeout(60)
    until(lambda: connection.connect_ex(address) == 0)
    content = json.dumps({"model": "pocket", "messages": ASKED, "max_tokens": 2000, "stream": True, **body}).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def events_of(connection):
    *output, done = lines(rest(connection).partition(b"\r\n\r\n")[2].decode().replace("\r\n", "\n"))
    assert done == "[DONE]"
    return [json.loads(event) for event in output]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("alternatives", [None, 5])
def test_who_does_not_read_gets_many_tokens_in_one_event(pocket, loop, alternatives):
    buffer = 2**14
    logprobs = {} if alternatives is None else {"logprobs": True, "top_logprobs": alternatives}
    with scripted(pocket, loop, ServerSettings(stream_buffer=buffer)) as (service, address, ahead):
        connection = ask(address, **logprobs)
        # the answer is there, and nothing of it was read
        assert service.over.wait(60)
        result = events_of(connection)
    ends = [event for event in result if event["choices"][0]["finish_reason"] is not None]
    pieces = [event for event in result if event["choices"][0]["delta"].get("content")]
    text = "".join(event["choices"][0]["delta"]["content"] for event in pieces)
    shown = [event["sigma0"]["choices"][0] for event in pieces]
    assert text == "".join(f" {number}" for number in range(LENGTH))
    assert [token["id"] for item in shown for token in item["tokens"]] == list(range(LENGTH))
    assert ends == result[-1:] and len(pieces) < LENGTH / 4 and max(len(item["tokens"]) for item in shown) > 5
    # what is counted goes on from event to event
    done = [sum(len(item["tokens"]) for item in shown[: place + 1]) for place in range(len(shown))]
    assert [item["full_passes"] for item in shown] == [6 * count for count in done]
    for event in pieces:
        (choice,), (current,) = event["choices"], event["sigma0"]["choices"]
        joined = "".join(token["text"] for token in current["tokens"])
        assert choice["delta"]["content"] == joined
        content = None if alternatives is None else [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]]
        assert content == (None if alternatives is None else [alternatives] * len(current["tokens"]))
    # the lists of the end are one event; before it no more than one event was written ahead of what the client took
    sizes = [len(json.dumps(event, ensure_ascii=False)) for event in pieces]
    assert max(sizes) <= buffer
    end = len(json.dumps(ends[0], ensure_ascii=False))
    assert sorted(ahead)[-3] <= HIGH_WATER + buffer and max(ahead) <= HIGH_WATER + end + 100


def test_an_answer_that_was_whole_when_time_ran_out_is_sent_whole():
    """Its last events wait for a slow reader, and after them what says that time is over."""
    tokens = written(None)[:6]
    end = RequestOutput("", tokens, "length", 3, 0, 6, 6, 6, savings([[1]], 1, 6, 6), None, None, None)
    source = SimpleNamespace(feed=lambda put: setattr(source, "put", put) or True)
    builder = SimpleNamespace(
        parsed=SimpleNamespace(include_usage=False, choices=[SimpleNamespace(request=SimpleNamespace(logprobs=None))]),
        opening=lambda: iter(()),
        tokens=lambda index, some: b"".join(b" %d" % token.id for token in some),
        end=lambda index, done: iter([b" end "]),
    )

    async def read():
        running = RunningChoices(600.0, lambda index, event: None, lambda: None)
        running.add(source)
        stream = answering.EventStream(SimpleNamespace(stream_buffer=2**14), running, builder, "some id")
        source.put(tokens[0])
        output = b""
        async for piece in stream.body_iterator:
            output += piece
            if piece == b" 0":
                for event in (*tokens[1:], end):
                    source.put(event)
                running._queue.put((0, TimeoutError()))
        return output

    output = asyncio.run(read())
    assert output.startswith(b" 0 1 2 3 4 5 end ") and b"[DONE]" in output


def test_who_leaves_without_reading_frees_all(pocket):
    with scripted(pocket, "asyncio", ServerSettings()) as (service, address, _):
        connection = ask(address)
        assert service.over.wait(60)
        assert service.app.state.handler.open == 1
        connection.close()
        until(lambda: service.app.state.handler.open == 0)


def test_a_long_answer_is_written_in_a_thread_and_is_the_same(pocket, monkeypatch):
    asked = {"logprobs": True, "top_logprobs": 3, "n": 2, "seed": 1, "temperature": 0.5}
    threads, made = [], answering.encoded

    def seen(value):
        threads.append(threading.current_thread().name)
        return made(value)

    monkeypatch.setattr(answering, "encoded", seen)
    with served(pocket) as server:
        # whoever asks first finds nothing in the prefix cache
        post(server, **asked)
        at_once = post(server, **asked).json()
        assert threads == []
        monkeypatch.setattr(answering, "LONG", 1)
        response = post(server, **asked)
    assert [name.partition("_")[0] for name in threads] == ["writing"]
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"] == at_once["choices"]
    assert response.json()["sigma0"] == at_once["sigma0"]


@pytest.mark.parametrize(
    "value",
    [{}, [], None, "é", {"a": []}, [[]], [{}], [{"a": [1, "x"]}, {"b": {}}], {"é": [{"x": 1}] * 300}, list(range(700))],
)
def test_json_in_pieces_is_json_in_one(value):
    whole = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert b"".join(encoded(value)) == whole
