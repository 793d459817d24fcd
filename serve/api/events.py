"""The jobs of one request on their way: told as their events come, and cancelled when nobody waits any more."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

from starlette.types import Receive

from sigma0.serve.engine.messages import RequestFailed, RequestOutput, TokenOutput

Event = TokenOutput | RequestOutput
Observer = Callable[[int, Event], None]
T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the response any more."""


class RunningChoices:
    """Jobs of one request.

    Args:
        seconds: For all of them together.
        observe: Is told every event.
        over: Is called once, when all are over or cancelled.

    Attributes:
        failure: What ended them ahead of their ends; None where nothing did.
    """

    def __init__(self, seconds: float, observe: Observer, over: Callable[[], None]) -> None:
        self._until = time.monotonic() + seconds
        self._observe = observe
        self._over: Callable[[], None] | None = over
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._sources: list[AsyncIterator[Event]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    @property
    def left(self) -> float:
        """Seconds until time is over."""
        return max(0.0, self._until - time.monotonic())

    def add(self, source: AsyncIterator[Event], behind: AsyncIterator[Event] | None = None) -> None:
        """Takes one more job, whose number is that of jobs before it.

        Args:
            source: Its events.
            behind: What these are made of, to be closed with them.
        """
        self._sources += [source] if behind is None else [source, behind]
        self._tasks.append(asyncio.create_task(self._pump(len(self._tasks), source)))

    async def _pump(self, index: int, source: AsyncIterator[Event]) -> None:
        try:
            async for event in source:
                self._queue.put_nowait((index, event))
                if isinstance(event, RequestOutput):
                    return
            raise RequestFailed("a job ended without telling its end")
        except Exception as error:  # raised again where the request waits
            self._queue.put_nowait((index, error))

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events of all jobs as they come, each with the number of its job.

        Raises:
            TimeoutError: When time is over.
            RequestFailed: Where a job failed.
        """
        left = len(self._tasks)
        while left:
            try:
                index, event = await asyncio.wait_for(self._queue.get(), self.left)
                if isinstance(event, Exception):
                    raise event
            except Exception as error:
                self.failure = error
                raise
            self._observe(index, event)
            left -= isinstance(event, RequestOutput)
            yield index, event

    async def all_done(self) -> list[RequestOutput]:
        """The ends of all jobs, in their order."""
        found: dict[int, RequestOutput] = {}
        async for index, event in self.events():
            if isinstance(event, RequestOutput):
                found[index] = event
        return [found[index] for index in sorted(found)]

    async def close(self) -> None:
        """Cancels what is still on its way, also where the caller is being cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for source in self._sources:
                # a task that was cancelled ahead of its first step has closed nothing
                close = getattr(source, "aclose", None)
                if close is not None:
                    await cast(AsyncGenerator[Any, Any], source).aclose()
        finally:
            if self._over is not None:
                over, self._over = self._over, None
                over()


async def unless_gone(receive: Receive, wanted: Awaitable[T]) -> T:
    """What is waited for, as long as the client waits too.

    Args:
        receive: Of a request whose body was read.
        wanted: What is waited for; it is cancelled when the client leaves.

    Raises:
        ClientGone: When the client left first.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.ensure_future(wanted), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientGone
    finally:
        waiting.cancel()
        leaving.cancel()
