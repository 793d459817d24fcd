"""Sockets that send nothing or half of something, descriptors that run out, and signals that end the server."""

import contextlib
import errno
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from unittest import mock

import httpx
import pytest

from sigma0.ladder import FidelityLadder
from sigma0.serve.api import connections
from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import stop_taking
from sigma0.serve.api.connections import Server
from tests.serve.api.test_chat import post
from tests.serve.api.test_load import until
from tests.serve.conftest import commanded, served, two_rungs

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HALF = HEAD + b'Content-Length: 100\r\n\r\n{"mod'
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
# neither an end id nor text that repeats itself ends it early
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "temperature": 2}
LONG = {"model": "pocket", "prompt": "Mary went", "n": 8, "stream": True, **ENDLESS}


def sent(port, data):
    opened = socket.create_connection(("127.0.0.1", port), timeout=30)
    opened.sendall(data)
    return opened


def rest(opened):
    """What comes until the server closes."""
    parts = []
    while part := opened.recv(2**16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.slow
def test_who_sends_no_whole_request_is_left(pocket):
    """A recv that returns nothing is a connection that the server closed; nothing else would end it."""
    with commanded(pocket, header_timeout=0.2, body_timeout=0.2) as (port, _):
        for data in (b"", b"GET /health HT", HEALTH + b"X-Slow: "):
            with closing(sent(port, data)) as opened:
                assert rest(opened) == b""
        with closing(sent(port, HALF)) as opened:
            answer = rest(opened)
            assert answer.startswith(b"HTTP/1.1 408 ") and b'"body_timeout"' in answer
        # a second request on a connection has the same limit as the first
        with closing(sent(port, HEALTH + b"\r\n" + HEALTH)) as opened:
            assert rest(opened).startswith(b"HTTP/1.1 200 ")
        # and so has the rest of a body that was answered ahead of its end
        with closing(sent(port, HEAD + b"Content-Length: 9999999\r\n\r\n{")) as opened:
            assert rest(opened).startswith(b"HTTP/1.1 413 ")


def test_headers_without_end_are_not_kept(pocket):
    def send_on(opened):
        for _ in range(10_000):
            opened.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        rest(opened)

    with commanded(pocket) as (port, _), closing(sent(port, HEALTH)) as opened:
        # a server that took them all would wait for more: it closes, also where what it says first can be read
        with contextlib.suppress(ConnectionError):
            send_on(opened)
        with pytest.raises(ConnectionError):
            send_on(opened)


def test_a_server_that_is_to_end_waits_for_no_body(pocket):
    with commanded(pocket) as (port, server), closing(sent(port, HALF)) as opened:
        until(lambda: server.server_state.tasks)
        server.servers[0].get_loop().call_soon_threadsafe(stop_taking, server._app)
        answer = rest(opened)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in answer
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503


def test_descriptors_that_run_out_are_said_now_and_then(pocket, monkeypatch, caplog):
    caplog.set_level(logging.ERROR)
    with commanded(pocket) as (port, _):
        with monkeypatch.context() as patched:
            patched.setattr(connections, "RESERVE", 2**40)
            for _ in range(3):
                answer = httpx.get(f"http://127.0.0.1:{port}/health")
                assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert caplog.text.count("out of file descriptors") == 1


def test_the_end_of_a_server_ends_its_threads(pocket):
    before = set(threading.enumerate())
    with served(pocket, ladder=FidelityLadder(two_rungs(pocket))) as server:
        for more in ({"guided_choice": ["park"]}, {"sigma0": {"ladder": "answer"}}):
            assert post(server, **more).status_code == 200
        assert {"parsing", "ladder"} <= {thread.name.partition("_")[0] for thread in threading.enumerate()}
    until(lambda: not set(threading.enumerate()) - before)


def test_accept_that_fails_is_logged_once_and_not_a_thousand_times(caplog):
    server, loop = Server(None, None, ServerSettings()), mock.Mock()
    for _ in range(1000):
        server._handle(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    assert caplog.text.count("out of file descriptors") == 1 and not loop.mock_calls
    server._handle(loop, {"exception": ValueError("other")})
    loop.default_exception_handler.assert_called_once()


@contextmanager
def command(tmp_path, *arguments):
    """`sigma0 serve` in a process; its port and what it prints."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "sigma0.cli", "serve", "pocket", "--port", str(port), "--dtype", "float32"]
    printed = tmp_path / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen([*line, "--threads", "1", *arguments], stdout=out, stderr=out)
    try:
        until(lambda: process.poll() is not None or is_listening(port), 20_000)
        yield process, port, lambda: printed.read_text(errors="replace").partition("stop with Ctrl+C")[2].strip()
    finally:
        process.kill()
        process.wait()


def is_listening(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code in (200, 503)
    except httpx.HTTPError:
        return False


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_half_a_request_does_not_keep_a_server(tmp_path, number):
    with command(tmp_path) as (process, port, printed):
        with closing(sent(port, HALF)) as half, closing(sent(port, b"")), closing(sent(port, b"GET /hea")):
            httpx.get(f"http://127.0.0.1:{port}/health")
            process.send_signal(number)
            assert rest(half).startswith(b"HTTP/1.1 503 ")
            # far within what a request may take: else this test never ends
            assert process.wait(300) == 0
        assert printed() == ""


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once_in_one_line(tmp_path, numbers):
    with command(tmp_path, "--drain-timeout", "500") as (process, port, printed):
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(numbers[0])
            until(lambda: not is_listening(port))
            assert process.poll() is None
            process.send_signal(numbers[1])
            assert process.wait(60) == 128 + numbers[1]
        assert printed() == "ended at once by a second signal: 1 request(s) cut off"


@pytest.mark.exhaustive
def test_what_is_not_done_in_time_is_cut_off_and_told_so(tmp_path):
    with command(tmp_path, "--drain-timeout", "0.2") as (process, port, printed):
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            output = [line for line in lines if line]
        assert output[-2] == "event: error" and '"shutting_down"' in output[-1]
        assert process.wait(60) == 1
        assert printed() == "1 request(s) cut off after 0.2 s: see --drain-timeout"


def test_pipelined_requests_that_are_left_behind_are_one_line(pocket, caplog):
    pytest.importorskip("httptools", reason="without it uvicorn reads one request at a time, and leaves none behind")
    body = json.dumps({"model": "pocket", "prompt": "Mary went", "max_tokens": 4}).encode()
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with commanded(pocket) as (port, _):
        with closing(sent(port, asked * 3000)) as client:
            client.recv(1)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        until(lambda: caplog.records)
    (line,) = caplog.records
    assert line.getMessage().endswith("its client has left") and line.exc_info is None
