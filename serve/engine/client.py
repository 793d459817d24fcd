"""A service of one engine, whatever its loop runs in: requests become commands, and reports become events."""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    Event,
    RequestCutOff,
    RequestOutput,
    ServiceStatus,
    ShuttingDown,
    SlotView,
    TokenOutput,
    Unavailable,
    check_request,
)
from sigma0.serve.engine.wire import Cancel, Command, EngineFacts, PassReport, Submit, Tell

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Delivery = tuple["QueuedEvents", Event]
# Seconds for the pass under way when requests are to be shown; a step that is being compiled takes longer.
LOOKING = 10.0


class Mailbox(Generic[T]):
    """Items for one reader on an event loop, in order, with less around them than `asyncio.Queue` has for many."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Adds an item. To be called on the reader's event loop, or before there is a reader."""
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        """The next item, as soon as there is one."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.popleft()


class QueuedEvents:
    """`sigma0.serve.engine.messages.RequestEvents` of one request, filled by the thread that hears from the engine.

    Args:
        loop: Event loop of the caller.
        cancel: Cancels the request in the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self._loop, self._cancel = loop, cancel
        self._events: Mailbox[Event] = Mailbox()
        self._take: Callable[[Event], None] = self._events.put
        self._is_over = False

    @staticmethod
    def put(deliveries: Sequence[Delivery]) -> None:
        """Adds events, in one call for each event loop; called from any thread."""
        for loop in {listener._loop for listener, _ in deliveries}:
            current = [delivery for delivery in deliveries if delivery[0]._loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, current)
            except RuntimeError:
                # the caller's loop is closed: no one reads the event
                _LOG.debug("an event came for a closed loop")

    def feed(self, take: Callable[[Event], None]) -> None:
        """Calls a function with every event, failures too, as it comes; in place of an iteration, and before one."""

        def taken(event: Event) -> None:
            if not isinstance(event, TokenOutput):
                self._is_over, self._take = True, self._events.put
            take(event)

        self._take = taken

    def __aiter__(self) -> "QueuedEvents":
        return self

    async def __anext__(self) -> TokenOutput | RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_over = not isinstance(event, TokenOutput)
        if isinstance(event, Exception):
            raise event
        return event

    async def aclose(self) -> None:
        """Cancels the request; a finished one stays as it was."""
        if not self._is_over:
            self._is_over = True
            self._cancel()


def _deliver(deliveries: Sequence[Delivery]) -> None:
    for listener, event in deliveries:
        listener._take(event)


class EngineClient(ABC):
    """A `sigma0.serve.engine.messages.Service` of one engine, whose commands lie in `_inbox`.

    A subclass calls `_receive` with every report of the engine's loop, in one thread, and in the end `_lose`.

    Args:
        facts: On the engine.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.name, self.model, self.tokenizer = facts.name, facts.model, facts.tokenizer
        self.context = facts.context
        self._limits, self._status = facts.limits, facts.status
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._listeners: dict[int, QueuedEvents] = {}
        self._looking: Future[tuple[SlotView, ...]] | None = None
        self._sent = self._taken = 0
        self._lock = threading.Lock()
        self._is_ending = False
        self._lost: str | None = None

    def submit(self, request: EngineRequest) -> QueuedEvents:
        """As `Service` has it. Must be called on an event loop."""
        check_request(request, self.model, self.context)
        with self._lock:
            if self._is_ending:
                raise ShuttingDown("the server is being shut down")
            if self._lost is not None:
                raise Unavailable(self._lost)
            # requests that the engine has not seen yet count as well, and those that can start at once do not
            waiting = self._status.waiting + self._sent - self._taken
            if waiting >= self._limits.max_waiting + self._limits.max_running - self._status.running:
                raise Busy(f"{waiting} requests are waiting already")
            key = self._sent
            events = QueuedEvents(asyncio.get_running_loop(), partial(self._cancel, key))
            self._listeners[key] = events
            self._sent += 1
            self._inbox.put(Submit(key, request))
        return events

    def _cancel(self, key: int) -> None:
        with self._lock:
            if self._listeners.pop(key, None) is not None:
                self._inbox.put(Cancel(key))

    @property
    def is_up(self) -> bool:
        """Whether the engine's loop runs."""
        return self._lost is None

    def status(self) -> ServiceStatus:
        """The engine's status after its last report."""
        return self._status

    def engines(self) -> Mapping[str, ServiceStatus]:
        """Empty: there is only the one that `status` is about."""
        return {}

    async def slots(self) -> tuple[SlotView, ...]:
        """As `Service` has it, after the current pass; for which `LOOKING` seconds are waited."""
        with self._lock:
            if self._lost is not None:
                raise Unavailable(self._lost)
            if self._looking is None:
                self._looking = Future()
                self._inbox.put(Tell.LOOK)
            # whoever asks meanwhile gets the same answer, which ends for none of them where one waits no more
            answer = asyncio.shield(asyncio.wrap_future(self._looking))
        return await asyncio.wait_for(answer, LOOKING)

    async def drain(self) -> None:
        """Takes no more requests and returns once all that were taken are finished."""
        with self._lock:
            self._is_ending = True
        self._inbox.put(Tell.DRAIN)
        while self.is_up:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Ends the engine's loop after its current pass; requests that are not finished fail."""
        with self._lock:
            self._is_ending = True
        self._inbox.put(Tell.CLOSE)
        self._join()

    @abstractmethod
    def _join(self) -> None:
        """Returns once the engine's loop, told to close, has ended."""

    def _receive(self, report: PassReport) -> None:
        deliveries: list[Delivery] = []
        with self._lock:
            self._status, self._taken = report.status, report.taken
            if report.slots is not None and self._looking is not None:
                self._looking.set_result(report.slots)
                self._looking = None
            for key, event in report.events:
                # of a request that was cancelled since, events may still come
                over = not isinstance(event, TokenOutput)
                listener = self._listeners.pop(key, None) if over else self._listeners.get(key)
                if listener is not None:
                    deliveries.append((listener, event))
        QueuedEvents.put(deliveries)

    def _lose(self, why: str) -> None:
        """Fails what is left of the requests: no report will come."""
        with self._lock:
            self._lost = why
            failure = RequestCutOff("the server is being shut down") if self._is_ending else Unavailable(why)
            left = [(listener, failure) for listener in self._listeners.values()]
            self._listeners.clear()
            if self._looking is not None:
                self._looking.set_exception(failure)
                self._looking = None
        QueuedEvents.put(left)
