"""The jobs of one request: a share of them with the engine at once, the others as those before them end.

So a request of more jobs than the queue holds is taken as a whole and keeps none of the queue from others.
"""

import asyncio
from collections import deque

from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestEvents,
    RequestOutput,
    Service,
    ShuttingDown,
    TokenOutput,
)

# Seconds until a job asks again whose turn it is and for which the engine has no room.
AGAIN = 0.05


class Backlog:
    """Jobs of all requests that wait for their turn.

    Args:
        limit: How many may.

    Attributes:
        waiting: How many do.
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
    """Hands the jobs of one request to the engine. To be made on an event loop.

    Args:
        service: The engine.
        at_once: Jobs that are with it at once.
        backlog: Counts the others.
    """

    def __init__(self, service: Service, at_once: int, backlog: Backlog) -> None:
        self._service = service
        self._backlog = backlog
        self._at_once = at_once
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._is_full = False

    def add(self, job: EngineRequest) -> RequestEvents:
        """Queues a job, or lets it wait for its turn.

        Raises:
            ValueError: For a job that can never run.
            Busy: If there is no room for the first job, or for those that wait.
            Unavailable: Where no engine is up.
        """
        if self._running < self._at_once and not self._is_full:
            try:
                events = self._service.submit(job)
            except ShuttingDown:
                raise
            except Busy:
                if not self._running:
                    raise
                # those behind it come behind it
                self._is_full = True
            else:
                self._running += 1
                return _InTurn(self, job, events)
        self._backlog.enter()
        return _InTurn(self, job, None)

    async def begin(self, job: EngineRequest) -> RequestEvents:
        """Queues a job that waited, once it has its turn and there is room."""
        if self._running < self._at_once and not self._queue:
            self._running += 1
        else:
            await self._turn()
        try:
            while True:
                try:
                    return self._service.submit(job)
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
        """A job that was with the engine is over: the next one has its turn."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def leave(self) -> None:
        """A job waits no more."""
        self._backlog.waiting -= 1


class _InTurn:
    """`sigma0.serve.engine.messages.RequestEvents` of a job that may still wait for its turn.

    Args:
        turns: Of its request.
        job: What is asked.
        events: Of the engine; None while the job waits.
    """

    def __init__(self, turns: Turns, job: EngineRequest, events: RequestEvents | None) -> None:
        self._turns, self._job, self._events = turns, job, events
        self._is_waiting, self._is_over = events is None, False

    def __aiter__(self) -> "_InTurn":
        return self

    async def __anext__(self) -> TokenOutput | RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._events is None:
                self._events = await self._turns.begin(self._job)
                self._leave()
            event = await anext(self._events)
        except Exception:
            self._end()
            raise
        if isinstance(event, RequestOutput):
            self._end()
        return event

    async def aclose(self) -> None:
        """Cancels the job; one that is over stays as it was."""
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
