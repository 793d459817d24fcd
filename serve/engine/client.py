"""A service of one engine, whatever its loop runs in: requests become commands, and reports become events."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count

from sigma0.serve.engine.events import Delivery, QueuedEvents
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestCutOff,
    ServiceStatus,
    ShuttingDown,
    SlotView,
    TokenOutput,
    Unavailable,
    check_request,
)
from sigma0.serve.engine.queues import Inbox
from sigma0.serve.engine.wire import Cancel, Close, Command, Drain, EngineFacts, Look, PassReport, Submit

# Seconds for the pass under way when requests are to be shown; a step that is being compiled takes longer.
LOOKING = 10.0


class EngineClient(ABC):
    """A `sigma0.serve.engine.messages.Service` of one engine, whose commands lie in `_inbox`.

    A subclass calls `_receive` with every report of the engine's loop, in one thread, and in the end `_lose`.

    Args:
        facts: On the engine.

    Attributes:
        name: Of the model.
        model: The settings of the looped model.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.name, self.model, self.tokenizer = facts.name, facts.model, facts.tokenizer
        self.context = facts.context
        self._limits, self._status = facts.limits, facts.status
        self._inbox: Inbox[Command] = Inbox()
        self._listeners: dict[int, QueuedEvents] = {}
        self._keys = count()
        self._looking: list[Future[tuple[SlotView, ...]]] = []
        self._sent = self._taken = 0
        self._lock = threading.Lock()
        self._is_ending = False
        self._lost: str | None = None

    def submit(self, request: EngineRequest) -> QueuedEvents:
        """Queues a request at once. Must be called on an event loop.

        Raises:
            ValueError: For a request that can never run.
            Busy: Where no more requests are taken.
            Unavailable: Where the engine was lost.
        """
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
            key = next(self._keys)
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
        """The requests in the engine after its current pass: those that run, then those that wait.

        Raises:
            Unavailable: Where the engine was lost.
            TimeoutError: Where no report came for `LOOKING` seconds.
        """
        future: Future[tuple[SlotView, ...]] = Future()
        with self._lock:
            if self._lost is not None:
                raise Unavailable(self._lost)
            # whoever asks meanwhile gets the same answer
            if not self._looking:
                self._inbox.put(Look())
            self._looking.append(future)
        return await asyncio.wait_for(asyncio.wrap_future(future), LOOKING)

    async def drain(self) -> None:
        """Takes no more requests and returns once all that were taken are finished."""
        with self._lock:
            self._is_ending = True
        self._inbox.put(Drain())
        while self.is_up:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Ends the engine's loop after its current pass; requests that are not finished fail."""
        with self._lock:
            self._is_ending = True
        self._inbox.put(Close())
        self._join()

    @abstractmethod
    def _join(self) -> None:
        """Returns once the engine's loop, told to close, has ended."""

    def _receive(self, report: PassReport) -> None:
        deliveries: list[Delivery] = []
        with self._lock:
            self._status, self._taken = report.status, report.taken
            looking = self._looking if report.slots is not None else []
            if looking:
                self._looking = []
            for key, event in report.events:
                # of a request that was cancelled since, events may still come
                over = not isinstance(event, TokenOutput)
                listener = self._listeners.pop(key, None) if over else self._listeners.get(key)
                if listener is not None:
                    deliveries.append((listener, event))
        for future in looking:
            # one that nobody waits for any more is cancelled
            if future.set_running_or_notify_cancel():
                future.set_result(report.slots or ())
        QueuedEvents.put(deliveries)

    def _lose(self, why: str) -> None:
        """Fails what is left of the requests: no report will come."""
        with self._lock:
            self._lost = why
            failure = RequestCutOff("the server is being shut down") if self._is_ending else Unavailable(why)
            left = [(listener, failure) for listener in self._listeners.values()]
            self._listeners.clear()
            looking, self._looking = self._looking, []
        for future in looking:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        QueuedEvents.put(left)
