"""Connections and shutdown: the cases that uvicorn does not handle.

uvicorn limits neither the time for the headers of a request nor that of an idle socket, logs nothing when file
descriptors run out (uvloop) or logs it thousands of times (asyncio), and at shutdown waits for half a request as for a
whole one.
"""

import asyncio
import errno
import logging
import os
import resource
import signal
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sigma0.serve.api.access import ServerSettings
from sigma0.serve.api.app import stop_taking
from sigma0.serve.api.errors import unavailable
from sigma0.serve.api.handlers import SENDING
from sigma0.serve.engine.client import EngineClient

_LOG = logging.getLogger(__name__)
# Descriptors kept back for files and for the server's other sockets.
RESERVE = 8
# Seconds between two lines in the log about the same trouble.
QUIET = 10.0
# Bytes of headers; h11 has a limit of its own, httptools has none.
MAX_HEADERS = 2**16
# Turns of the event loop between the signal and the last request that is taken.
TICKS = 10
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
# Of accept() where descriptors or memory run out.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ExhaustionLog:
    """Logs that descriptors have run out, at most once in `QUIET` seconds, with the number of refusals."""

    def __init__(self) -> None:
        self._next = 0.0
        self._unsaid = 0

    def note(self) -> None:
        """Counts one refused connection."""
        self._unsaid += 1
        now = time.monotonic()
        if now >= self._next:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            _LOG.error(
                "out of file descriptors (limit %d): %d connection(s) not taken, and more until others end; "
                "raise the limit with ulimit -n",
                limit,
                self._unsaid,
            )
            self._next, self._unsaid = now + QUIET, 0


if TYPE_CHECKING:
    _Base = asyncio.Protocol
else:
    _Base = AutoHTTPProtocol


class TimedProtocol(_Base):
    """uvicorn's protocol with a time limit on headers, closed idle sockets, and a reserve of descriptors.

    Args:
        *args: As uvicorn passes them.
        **kwargs: As uvicorn passes them.

    Attributes:
        header_timeout: Seconds; set by `protocol_of`.
        log: Of refused connections; set by `protocol_of`.
    """

    header_timeout: float
    log: ExhaustionLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes a connection, unless descriptors run out."""
        super().connection_made(transport)
        self._transport = cast(asyncio.Transport, transport)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # the lowest free number is given out, so that a high one means that few are left
        if limit != resource.RLIM_INFINITY and transport.get_extra_info("socket").fileno() >= limit - RESERVE:
            self.log.note()
            self._transport.write(_FULL)
            self._transport.close()
            return
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of a request."""
        super().data_received(data)
        if self._is_between_requests:
            self._start_timer()
            # of a request that was answered ahead of its end, the rest is read and thrown away
            if not getattr(getattr(self, "cycle", None), "more_body", False):
                self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADERS:
                self._close_if_idle()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _is_between_requests(self) -> bool:
        """Whether no request is under way, also where bytes of an answered one still come."""
        cycle = getattr(self, "cycle", None)
        return cycle is None or bool(cycle.response_complete)

    def _start_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = asyncio.get_running_loop().call_later(self.header_timeout, self._close_if_idle)

    def _stop_timer(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_if_idle(self) -> None:
        self._stop_timer()
        if self._is_between_requests and self._transport is not None:
            self._transport.close()


def protocol_of(settings: ServerSettings, log: ExhaustionLog) -> type[TimedProtocol]:
    """The protocol of a server.

    Args:
        settings: Have the time limit.
        log: Of connections that are not taken.
    """
    return type("TimedProtocol", (TimedProtocol,), {"header_timeout": settings.header_timeout, "log": log})


class Server(uvicorn.Server):
    """uvicorn with a bounded graceful shutdown; a second signal ends the process at once.

    Args:
        app: As `sigma0.serve.api.app.create_app` returned it.
        service: Its engine; closed when the time for a graceful shutdown is over.
        settings: Time limits.

    Attributes:
        cut_off: Requests that were not answered when that time was over.
    """

    def __init__(self, app: FastAPI, service: EngineClient, settings: ServerSettings) -> None:
        self._app, self._service, self._settings = app, service, settings
        self._log = ExhaustionLog()
        self.cut_off = 0
        config = uvicorn.Config(
            self._answered,
            interface="asgi3",
            http=protocol_of(settings, self._log),
            log_level="warning",
            # the access log has paths; what happens in a request is logged by its number alone
            access_log=False,
            server_header=False,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
            # until then clients may read what was generated; a client that does not read is dropped
            timeout_graceful_shutdown=int(settings.drain_timeout + SENDING) + 1,
        )
        super().__init__(config)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app; a request that is cancelled at the end of the process is no failure, nor one whose client left."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            await unavailable("the server is being shut down", "shutting_down").response()(scope, receive, send)
        cycle = getattr(send, "__self__", None)
        if cycle is not None and cycle.transport.is_closing():
            # uvicorn tells this to the newest of pipelined requests alone, and misses the rest of the others' answers
            cycle.disconnected = True

    async def startup(self, sockets: Any = None) -> None:
        """Begins to listen."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle)
        if self._settings.tls_cert is not None:
            # uvicorn has no option for it, and by default a client may take a minute over its handshake
            handshake = {"ssl_handshake_timeout": self._settings.header_timeout}
            loop.create_server = partial(loop.create_server, **handshake)  # type: ignore[method-assign]
        await super().startup(sockets)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            self._log.note()
            return
        loop.default_exception_handler(context)

    async def shutdown(self, sockets: Any = None) -> None:
        """Takes no more requests, finishes those that were taken, and cuts off what is left after `drain_timeout`."""
        for _ in range(TICKS):
            # a turn of the loop takes what has come by then: connections, and a turn later what was sent on them
            await asyncio.sleep(0.01)
        stop_taking(self._app)
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        await asyncio.sleep(self._settings.drain_timeout)
        self.cut_off = int(self._app.state.handler.open)
        await asyncio.to_thread(self._service.close)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `ended_by_signals` has them, until the process has ended."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown; the second one ends the process."""
        if self.should_exit:
            number = int(self._app.state.handler.open)
            os.write(2, f"ended at once by a second signal: {number} request(s) cut off\n".encode())
            os._exit(128 + sig)
        self.should_exit = True

    def ended_by_signals(self) -> None:
        """Listens to SIGINT and SIGTERM from now on. To be called in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
