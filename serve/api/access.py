"""Access limits of the server: settings, API key, and the size of a body and the time to send it."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, SettingsConfigDict
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.config import OnCollapse
from sigma0.decode.grammar.spec import CallStyle
from sigma0.serve.api.collector import check_collector
from sigma0.serve.api.errors import ApiError, busy, unavailable
from sigma0.serve.api.hosts import check_hosts
from sigma0.serve.api.keys import KeyRing, is_key, read_keys
from sigma0.serve.api.tls import check_tls
from sigma0.serve.engine.messages import Busy

# Readable without the key: whether the server is up, and the page, which has its own field for the key.
OPEN_PATHS = frozenset({"/", "/health"})
OPEN_FOLDER = "/page/"
# Bodies of the largest size that may be half sent at the same time.
BODIES_AT_ONCE = 64
DRAIN_TIMEOUT = 30.0
# Of an answer to a body that did not come whole: the rest of it is not read.
CLOSE = {"Connection": "close"}
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Environment(BaseSettings):
    """Settings that are not given as options, since options stand in lists of processes."""

    model_config = SettingsConfigDict(env_prefix="SIGMA0_", extra="ignore", env_ignore_empty=True)

    api_key: SecretStr | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerSettings:
    """Limits of the API; the length of the queue is a limit of the engine."""

    api_key: SecretStr | None = None  # Key that clients must send; None: none, but for those of `api_key_file`
    api_key_file: Path | None = None  # File of further keys, one a line, which others may not read; None: no file
    # File of a certificate chain in PEM, with which the server speaks TLS; None: it does not
    tls_cert: Path | None = None
    tls_key: Path | None = None  # File of its private key; None: in `tls_cert`
    # File of authorities; a client has to have a certificate of one of them. None: it need not
    tls_client_ca: Path | None = None
    max_body_bytes: Count = 2**20  # Of a request
    max_prompt_tokens: Count | None = None  # Of one prompt; None: what the context holds
    max_new_tokens: Count = 4096  # Of one choice, also where a request names no limit
    max_sources: Count = 64  # Of `sigma0.sources`
    max_source_chars: Count = 2**15  # Of all of them together: searching an answer in them takes time
    max_n: Count = 8  # Choices for each prompt
    max_prompts: Count = 32  # Prompts of one completion request
    max_at_once: Count = 32  # Choices of one request that are in the engine at once; the others wait for those to end
    max_concurrent: Count = 256  # Requests that are being answered at once; more get a 429
    max_parsing: Count = 64  # Requests that are being tokenized or wait for it; more get a 429
    # Bytes of an event of a stream, about, where a client that reads slowly gets many tokens in one
    stream_buffer: Count = 2**16
    # Seconds until the headers of a request must have come, from the first byte or the connection on
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 30.0  # Seconds until its body must have come, from the headers on
    # Seconds for requests in progress when the server shuts down; what is left then is cut off
    drain_timeout: Seconds = DRAIN_TIMEOUT
    request_timeout: Seconds = 600.0  # Seconds for one request, waiting included
    # Hosts beside loopback names that requests may name, as `sigma0.serve.api.hosts` reads them
    allowed_hosts: tuple[str, ...] = ()
    # Address of a collector that gets a span for each request (OTLP over HTTP); None: no spans
    otlp_endpoint: str | None = None
    on_collapse: OnCollapse = "stop"  # What is done with a text that repeats itself, where a request does not say
    tool_parser: CallStyle | None = None  # How the model writes calls of tools; None: as its chat template says

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_hosts(value)

    @field_validator("api_key")
    @classmethod
    def _is_a_key(cls, value: SecretStr | None) -> SecretStr | None:
        key = "x" if value is None else value.get_secret_value()
        if not is_key(key):
            raise ValueError("is empty, or holds spaces or signs that no header can (it is not shown here)")
        return value

    @field_validator("api_key_file")
    @classmethod
    def _holds_keys(cls, value: Path | None) -> Path | None:
        if value is not None:
            read_keys(value)
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_collector(cls, value: str | None) -> str | None:
        if value is not None:
            check_collector(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "ServerSettings":
        check_tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        return self

    @property
    def keys(self) -> tuple[SecretStr, ...]:
        """All keys that clients may send, read from the file now; none where nobody needs one."""
        from_file = () if self.api_key_file is None else read_keys(self.api_key_file)
        return from_file if self.api_key is None else (self.api_key, *from_file)


class KeyCheck:
    """ASGI middleware: refuses requests without an API key (`Authorization: Bearer KEY`).

    Args:
        app: The next layer.
        keys: Of which a client has to send one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr]) -> None:
        self._app = app
        self._keys = KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            authorization = Headers(scope=scope).get("authorization", "").encode("latin-1")
            scheme, _, given = authorization.partition(b" ")
            if not self._keys.has(given.strip()) or scheme.lower() != b"bearer":
                error = ApiError(
                    401,
                    "no API key, or a wrong one: send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ShutdownSignal:
    """Set when the server shuts down; ends every wait for the rest of a request body."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.has_begun = False

    def begin(self) -> None:
        """Ends all waits; may be called from any thread."""
        self.has_begun = True
        for future in list(self._waiting):
            future.get_loop().call_soon_threadsafe(_wake, future)

    async def unless_ending(self, receive: Receive, seconds: float) -> Message:
        """The next message of a request whose body is incomplete; requests that were complete before are answered.

        Args:
            receive: Of the request.
            seconds: To wait at most.

        Raises:
            ApiError: 503 when the server shuts down, 408 when time is over.
        """
        over = unavailable("the server is being shut down", "shutting_down")
        if self.has_begun:
            raise over
        ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(ending)
        message = asyncio.ensure_future(receive())
        try:
            first: set[asyncio.Future[Any]] = {message, ending}
            await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            if ending.done():
                raise over
            raise ApiError(408, "the body of the request took too long to come", code="body_timeout", headers=CLOSE)
        finally:
            self._waiting.discard(ending)
            message.cancel()


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class BodyLimit:
    """ASGI middleware: refuses bodies over a size (declared or not), too many at once, and slow ones.

    Args:
        app: The next layer.
        limit: Bytes of one body at most.
        seconds: For a body to arrive.
        ending: Set when the server shuts down; None: never.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float = 30.0, ending: ShutdownSignal | None = None) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds
        self._ending = ending or ShutdownSignal()
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "")
        # cut to a number of digits that int() takes
        if content_length.isdecimal() and int(content_length[:32]) > self._limit:
            await self._error().response()(scope, receive, send)
            return
        size = held = 0
        until = time.monotonic() + self._seconds
        is_whole = False

        async def counted() -> Message:
            nonlocal size, held, is_whole
            if is_whole:
                return await receive()
            message = await self._ending.unless_ending(receive, max(0.0, until - time.monotonic()))
            count = len(message.get("body", b""))
            size, held, self._held = size + count, held + count, self._held + count
            if size > self._limit:
                # FastAPI passes an HTTPException that is raised while it reads a body to its handler
                raise self._error()
            if self._held > BODIES_AT_ONCE * self._limit:
                raise busy(Busy("too many bodies are being sent at once"))
            if not message.get("more_body"):
                held, self._held = 0, self._held - held
                is_whole = True
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= held

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is over {self._limit} bytes", code="body_too_large")
