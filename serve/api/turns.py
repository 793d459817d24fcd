"""Choices of one HTTP request: a limited number of them is in the engine at once, the others wait for those to end.

So an HTTP request with more choices than the queue holds is taken as a whole and leaves the queue to others.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestEvents,
    RequestOutput,
    Service,
    ShuttingDown,
    TokenOutput,
)

# Seconds between two attempts to submit a request whose turn it is while the engine is full.
AGAIN = 0.05


class Backlog:
    """Engine requests that wait for their turn, over all HTTP requests.

    Args:
        limit: How many may wait.

    Attributes:
        waiting: How many wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting = 0

    def enter(self) -> None:
        """Counts one more.

        Raises:
            Busy: If there are too many.
        """
        if self.waiting >= self._limit:
            raise Busy(f"{self.waiting} choices are waiting for their turn already")
        self.waiting += 1


class Turns:
    """Submits the engine requests of one HTTP request. To be made on an event loop.

    Args:
        service: The engine.
        at_once: Requests that are in the engine at once.
        backlog: Counts the others.
    """

    def __init__(self, service: Service, at_once: int, backlog: Backlog) -> None:
        self._service = service
        self._backlog = backlog
        self._at_once = at_once
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._is_full = False

    def add(self, request: EngineRequest) -> RequestEvents:
        """Queues a request, or lets it wait for its turn.

        Raises:
            ValueError: For a request that can never run.
            Busy: If there is no room for the first request, or for those that wait.
            Unavailable: Where no engine is up.
        """
        if self._running < self._at_once and not self._is_full:
            try:
                events = self._service.submit(request)
            except ShuttingDown:
                raise
            except Busy:
                if not self._running:
                    raise
                # the following ones wait too, to keep their order
                self._is_full = True
            else:
                self._running += 1
                return _InTurn(self, request, events)
        self._backlog.enter()
        return _InTurn(self, request, None)

    async def begin(self, request: EngineRequest) -> RequestEvents:
        """Submits a request that waited, once it is its turn and the engine has room."""
        if self._running < self._at_once and not self._queue:
            self._running += 1
        else:
            await self._turn()
        try:
            while True:
                try:
                    return self._service.submit(request)
                except ShuttingDown:
                    raise
                except Busy:
                    await asyncio.sleep(AGAIN)
        except BaseException:
            self.over()
            raise

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.over()
            raise

    def over(self) -> None:
        """Called when a request has left the engine: the next one has its turn."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def leave(self) -> None:
        """Called when a request no longer waits."""
        self._backlog.waiting -= 1


class _InTurn:
    """`sigma0.serve.engine.messages.RequestEvents` of a request that may still wait for its turn.

    Args:
        turns: Of its HTTP request.
        request: The engine request.
        events: Of the engine; None while the request waits.
    """

    def __init__(self, turns: Turns, request: EngineRequest, events: RequestEvents | None) -> None:
        self._turns, self._request, self._events = turns, request, events
        self._is_waiting, self._is_over = events is None, False

    def feed(self, take: Callable[[TokenOutput | RequestOutput | Exception], None]) -> bool:
        """Calls a function with every event as it comes, in place of an iteration; False where that cannot be done."""
        feed = getattr(self._events, "feed", None)
        if feed is None:
            return False

        def taken(event: TokenOutput | RequestOutput | Exception) -> None:
            if not isinstance(event, TokenOutput):
                self._end()
            take(event)

        feed(taken)
        return True

    def __aiter__(self) -> "_InTurn":
        return self

    async def __anext__(self) -> TokenOutput | RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._events is None:
                self._events = await self._turns.begin(self._request)
                self._leave()
            event = await anext(self._events)
        except Exception:
            self._end()
            raise
        if isinstance(event, RequestOutput):
            self._end()
        return event

    async def aclose(self) -> None:
        """Cancels the request; a finished one stays as it was."""
        is_over, events = self._is_over, self._events
        self._end()
        if events is not None and not is_over:
            await events.aclose()

    def _leave(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._turns.leave()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._leave()
        if self._events is not None:
            self._turns.over()
