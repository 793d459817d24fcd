"""Large bodies, one at a time: what reading them costs must not reach the requests of others.

JSON is parsed, validated and tokenized in stretches of some milliseconds to some tenths of a second that nothing else
in the process can interrupt (Python's lock is held), so more threads would not help. A large body therefore waits for
its turn, and a turn ends with a pause in proportion to what it took: however many come, others keep most of the time.
During a turn the garbage collector rests, since the many small objects of a large body set it off again and again.
"""

import asyncio
import gc
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sigma0.serve.api.errors import ApiError, busy
from sigma0.serve.engine.messages import Busy

# Bytes of a body from which on it waits for its turn: some thousand tokens, tokenized in a few milliseconds.
LARGE = 2**12
# Bodies that wait for their turn at most.
WAITING = 8
# Pause after a turn, in lengths of the turn, and at most in seconds.
PAUSE, LONGEST_PAUSE = 3.0, 1.0
# Seconds until a refusal is told: who does not heed Retry-After does not send the next megabyte at once.
REFUSAL = 0.5
_STATE = "large_body_is_over"


class LargeBodies:
    """Lets large bodies through one by one, and refuses those that would wait behind too many.

    A turn is from the end of the body until `turn_is_over`, or the end of the request.

    Args:
        app: What is asked behind it.
        size: Bytes from which on a body is large.
        waiting: How many may wait.
    """

    def __init__(self, app: ASGIApp, size: int = LARGE, waiting: int = WAITING) -> None:
        self._app = app
        self._size = size
        self._most = waiting
        self._waiting = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told[:32]) >= self._size and self._waiting >= self._most:
            # before a byte of it is kept, and while nothing of it is read
            error = self._error()
            await asyncio.sleep(REFUSAL)
            await error.response()(scope, receive, send)
            return
        size = 0
        state = scope.setdefault("state", {})

        async def in_turn() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size >= self._size and not message.get("more_body") and _STATE not in state:
                state[_STATE] = await self._begin()
            return message

        try:
            await self._app(scope, in_turn, send)
        finally:
            turn_is_over(scope)

    async def _begin(self) -> Callable[[], None]:
        """Waits for the turn; returns what ends it."""
        if self._waiting >= self._most:
            raise self._error()
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        began, collects = time.monotonic(), gc.isenabled()
        gc.disable()

        def end() -> None:
            if collects:
                gc.enable()
            pause = min(PAUSE * (time.monotonic() - began), LONGEST_PAUSE)
            asyncio.get_running_loop().call_later(pause, self._turn.release)

        return end

    def _error(self) -> ApiError:
        return busy(Busy(f"{self._waiting} large requests are waiting to be read already"))


def turn_is_over(scope: Scope) -> None:
    """Ends the turn of a request whose body was large: it is tokenized, or refused. Further calls do nothing."""
    end = scope.get("state", {}).get(_STATE)
    if end is not None:
        scope["state"][_STATE] = None
        end()
