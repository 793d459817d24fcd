"""Choices of one HTTP request: their events, merged as they come, and their cancellation."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

from starlette.types import Receive

from sigma0.serve.engine.client import Mailbox
from sigma0.serve.engine.messages import RequestFailed, RequestOutput, TokenOutput

Event = TokenOutput | RequestOutput
Observer = Callable[[int, Event], None]
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection."""


class RunningChoices:
    """Choices of one HTTP request.

    Args:
        seconds: Time limit of all of them together.
        observe: Called with every event.
        over: Called once, when all are finished or cancelled.

    Attributes:
        failure: The exception that ended them early; None where none did.
    """

    def __init__(self, seconds: float, observe: Observer, over: Callable[[], None]) -> None:
        self._until = time.monotonic() + seconds
        self._observe = observe
        self._over: Callable[[], None] | None = over
        self._queue: Mailbox[tuple[int, Event | Exception]] = Mailbox()
        self._choices = 0
        self._sources: list[AsyncIterator[Event]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    @property
    def left(self) -> float:
        """Seconds until time is over."""
        return max(0.0, self._until - time.monotonic())

    def add(self, source: AsyncIterator[Event], inner: AsyncIterator[Event] | None = None) -> None:
        """Adds a choice; its index is the number of choices added before it.

        Args:
            source: Its events.
            inner: The iterator that `source` is made from, closed with it.
        """
        self._sources += [source] if inner is None else [source, inner]
        index, self._choices = self._choices, self._choices + 1
        # what an engine has made needs no task of its own to come here
        feed = getattr(source, "feed", None)
        if feed is None or not feed(lambda event: self._queue.put((index, event))):
            self._tasks.append(asyncio.create_task(self._pump(index, source)))

    async def _pump(self, index: int, source: AsyncIterator[Event]) -> None:
        try:
            async for event in source:
                self._queue.put((index, event))
                if isinstance(event, RequestOutput):
                    return
            raise RequestFailed("a choice ended without its output")
        except Exception as error:  # raised again where the request waits
            self._queue.put((index, error))

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events of all choices as they come, each with the index of its choice.

        Raises:
            TimeoutError: When time is over.
            RequestFailed: Where a choice failed.
        """
        left = self._choices
        clock = asyncio.get_running_loop().call_later(self.left, self._queue.put, (0, TimeoutError()))
        try:
            while left:
                index, event = await self._queue.get()
                if isinstance(event, Exception):
                    self.failure = event
                    raise event
                self._observe(index, event)
                left -= isinstance(event, RequestOutput)
                yield index, event
        finally:
            clock.cancel()

    @property
    def has_more(self) -> bool:
        """Whether the next event is there already."""
        return len(self._queue) > 0

    async def all_done(self) -> list[RequestOutput]:
        """The outputs of all choices, in their order."""
        outputs: dict[int, RequestOutput] = {}
        async for index, event in self.events():
            if isinstance(event, RequestOutput):
                outputs[index] = event
        return [outputs[index] for index in sorted(outputs)]

    async def close(self) -> None:
        """Cancels unfinished choices, also where the caller is being cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for source in self._sources:
                # a task that was cancelled before its first step has closed nothing
                close = getattr(source, "aclose", None)
                if close is not None:
                    await cast(AsyncGenerator[Any, Any], source).aclose()
        finally:
            if self._over is not None:
                over, self._over = self._over, None
                over()


async def unless_gone(receive: Receive, wanted: Awaitable[T]) -> T:
    """The result of an awaitable, unless the client disconnects first.

    Args:
        receive: Of a request whose body was read.
        wanted: The awaitable; it is cancelled when the client disconnects.

    Raises:
        ClientGone: When the client disconnected first.
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
