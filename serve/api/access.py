"""What a client may take of the server: settings, the key, and the size of a body and the time to send it."""

import asyncio
import hmac
import time
from typing import Annotated, Any

from pydantic import ConfigDict, Field, SecretStr, field_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, SettingsConfigDict
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.config import OnCollapse
from sigma0.serve.api.errors import ApiError, busy, unavailable
from sigma0.serve.api.hosts import check_hosts
from sigma0.serve.engine.messages import Busy

# What may be read without the key: whether the server is up, and the page, which asks for the key itself.
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
    """Limits of the protocol; the length of the queue is the service's own.

    Attributes:
        api_key: What clients must know; None: nothing.
        max_body_bytes: Of a request.
        max_prompt_tokens: Of one prompt; None: what the context holds.
        max_new_tokens: Of one choice, also where a request names no limit.
        max_source_chars: Of all `sigma0.sources` together: looking an answer up in them holds the engine up.
        max_n: Choices for each prompt.
        max_prompts: Prompts of one completion request.
        max_at_once: Choices of one request that are with the engine at once; the others wait for those to end.
        max_concurrent: Requests that are being answered at once; more are told to come back.
        max_planning: Requests that are being tokenized or wait for it; more are told to come back.
        header_timeout: Seconds until the headers of a request must have come, from the first byte or the connection on.
        body_timeout: Seconds until its body must have come, from the headers on.
        drain_timeout: Seconds for what is under way when the server is to end; what is left then is cut off.
        request_timeout: Seconds for one request, waiting included.
        allowed_hosts: Hosts beside loopback names that requests may name, as `sigma0.serve.api.hosts` reads them.
        on_collapse: What becomes of a text that runs in circles, where a request does not say.
    """

    api_key: SecretStr | None = None
    max_body_bytes: Count = 2**20
    max_prompt_tokens: Count | None = None
    max_new_tokens: Count = 4096
    max_source_chars: Count = 2**15
    max_n: Count = 8
    max_prompts: Count = 32
    max_at_once: Count = 32
    max_concurrent: Count = 256
    max_planning: Count = 64
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 30.0
    drain_timeout: Seconds = DRAIN_TIMEOUT
    request_timeout: Seconds = 600.0
    allowed_hosts: tuple[str, ...] = ()
    on_collapse: OnCollapse = "stop"

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_hosts(value)

    @field_validator("api_key")
    @classmethod
    def _is_a_key(cls, value: SecretStr | None) -> SecretStr | None:
        key = "x" if value is None else value.get_secret_value()
        if not key or not key.isprintable() or " " in key:
            raise ValueError("is empty, or holds spaces or signs that no header can (it is not shown here)")
        return value


class KeyCheck:
    """Lets through who knows the key: `Authorization: Bearer KEY`.

    Args:
        app: What is asked behind it.
        key: What must be known.
    """

    def __init__(self, app: ASGIApp, key: SecretStr) -> None:
        self._app = app
        self._expected = b"Bearer " + key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            told = Headers(scope=scope).get("authorization", "").encode("latin-1")
            scheme, _, given = told.partition(b" ")
            # in constant time, so that nothing is learned from how long a wrong key takes
            if not hmac.compare_digest(scheme.lower().capitalize() + b" " + given.strip(), self._expected):
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
    """That the server is to end: whoever waits for more of a request need not wait any longer."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.has_begun = False

    def begin(self) -> None:
        """Ends all waiting; may be called from any thread."""
        self.has_begun = True
        for future in list(self._waiting):
            future.get_loop().call_soon_threadsafe(_wake, future)

    async def unless_ending(self, receive: Receive, seconds: float) -> Message:
        """The next message of a request whose body is still to come; what came whole before the end is answered.

        Args:
            receive: Of the request.
            seconds: To wait at most.

        Raises:
            ApiError: 503 when the server is to end, 408 when time is over.
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
    """Refuses bodies over a size, whether they say so beforehand or not, more of them at once than fit, and slow ones.

    Args:
        app: What is asked behind it.
        limit: Bytes of one body at most.
        seconds: For a body to come.
        ending: Tells when no body is waited for any more; None: nothing does.
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
        told = Headers(scope=scope).get("content-length", "")
        # so many digits at most that int() takes them
        if told.isdecimal() and int(told[:32]) > self._limit:
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
                # FastAPI hands an HTTPException out of the reading of a body on to its handler
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
