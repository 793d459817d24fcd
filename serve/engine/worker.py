"""Worker thread of the engine, for callers on an event loop: requests go in, and their outputs come back."""

import asyncio
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.mailbox import Mailbox
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestCutOff,
    RequestFailed,
    RequestOutput,
    ServiceStatus,
    ShuttingDown,
    TokenOutput,
)

_LOG = logging.getLogger(__name__)
_QueueItem = TokenOutput | RequestOutput | RequestFailed | Busy


Delivery = tuple["QueuedEvents", _QueueItem]


class QueuedEvents:
    """`sigma0.serve.engine.messages.RequestEvents` of one request, filled by the engine's thread.

    Args:
        loop: Event loop of the caller.
        cancel: Cancels the request in the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[["QueuedEvents"], None]) -> None:
        self._loop = loop
        self._cancel = cancel
        self._events: Mailbox[_QueueItem] = Mailbox()
        self._take: Callable[[_QueueItem], None] = self._events.put
        self._is_over = False

    @staticmethod
    def put(deliveries: Sequence[Delivery]) -> None:
        """Adds events, in one call for each event loop; called from the engine's thread."""
        for loop in {listener._loop for listener, _ in deliveries}:
            own = [delivery for delivery in deliveries if delivery[0]._loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:
                # the caller's loop is closed: no one reads the event
                _LOG.debug("an event came for a closed loop")

    def feed(self, take: Callable[[_QueueItem], None]) -> None:
        """Calls a function with every event, failures too, as it comes; in place of an iteration, and before one."""

        def taken(event: _QueueItem) -> None:
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
        if isinstance(event, RequestFailed | Busy):
            raise event
        return event

    async def aclose(self) -> None:
        """Cancels the request; a finished one stays as it was."""
        if not self._is_over:
            self._is_over = True
            self._cancel(self)


def _deliver(deliveries: Sequence[Delivery]) -> None:
    for listener, event in deliveries:
        listener._take(event)


class EngineService:
    """A `sigma0.serve.engine.messages.Service` of one engine.

    Args:
        engine: Owned by the thread from here on.
        name: Of the model.
        threads: CPU threads of torch in the engine's thread; None: torch's default.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
    """

    def __init__(self, engine: Engine, name: str, threads: int | None = None) -> None:
        self.name = name
        self.model = engine.model
        self.tokenizer = engine.tokenizer
        self.context = engine.context
        self._engine = engine
        self._threads = threads
        self._listeners: dict[int, QueuedEvents] = {}
        self._keys: dict[QueuedEvents, int] = {}
        self._inbox: deque[tuple[EngineRequest | None, QueuedEvents]] = deque()
        self._wake = threading.Condition()
        self._status = engine.status()
        self._entering = 0
        self._is_draining = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sigma0-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> QueuedEvents:
        """Queues a request at once. Must be called on an event loop.

        Raises:
            ValueError: For a request that can never run.
            Busy: Where no more requests are taken.
        """
        self._engine.check(request)
        with self._wake:
            if self._is_draining or self._is_closed:
                raise ShuttingDown("the server is being shut down")
            # requests that the engine has not seen yet count as well, and those that can start at once do not
            waiting = self._status.waiting + self._entering + _requests(self._inbox)
            limits = self._engine.limits
            if waiting >= limits.max_waiting + limits.max_running - self._status.running:
                raise Busy(f"{waiting} requests are waiting already")
            events = QueuedEvents(asyncio.get_running_loop(), self._cancel)
            self._inbox.append((request, events))
            self._wake.notify()
        return events

    def _cancel(self, events: QueuedEvents) -> None:
        with self._wake:
            self._inbox.append((None, events))
            self._wake.notify()

    @property
    def is_up(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def status(self) -> ServiceStatus:
        """The engine's status after its last pass."""
        return self._status

    def engines(self) -> Mapping[str, ServiceStatus]:
        """Empty: there is only the one that `status` is about."""
        return {}

    async def drain(self) -> None:
        """Takes no more requests and returns once all that were taken are finished."""
        with self._wake:
            self._is_draining = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Ends the thread after its current pass; requests that are not finished fail."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._take_in():
            if not self._engine.has_work:
                continue
            try:
                events = self._engine.step()
            except Exception as error:
                # a pass that breaks leaves no request in a known state;
                # the message is left out, since it may quote a prompt
                frames = "".join(traceback.format_tb(error.__traceback__))
                _LOG.error("a pass failed: %s; all requests under way end\n%s", type(error).__name__, frames)
                self._fail_all(RequestFailed(f"{type(error).__name__} in the engine"))
                continue
            self._status = self._engine.status()
            QueuedEvents.put([(self._listeners[key], event) for key, event in events])
            for key, event in events:
                if isinstance(event, RequestOutput | RequestFailed):
                    self._end(key)
        self._fail_all(RequestCutOff("the server is being shut down"))

    def _take_in(self) -> bool:
        """Waits for requests and cancellations and passes them to the engine; False once the thread is to end."""
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._is_draining or self._is_closed):
                self._wake.wait()
            inbox = list(self._inbox)
            self._inbox.clear()
            self._entering = _requests(inbox)
            closing = self._is_closed or (self._is_draining and not inbox and not self._engine.has_work)
        for request, events in inbox:
            if request is not None:
                self._submit(request, events)
            elif events in self._keys:
                key = self._keys[events]
                self._engine.cancel(key)
                self._end(key)
        if inbox:
            with self._wake:
                self._status, self._entering = self._engine.status(), 0
        return not closing

    def _submit(self, request: EngineRequest, events: QueuedEvents) -> None:
        try:
            key = self._engine.submit(request)
        except Busy as error:
            QueuedEvents.put([(events, error)])
        except Exception as error:
            # caught here, since without its thread the service would neither answer nor end; the caller logs the cause
            failure = RequestFailed(f"{type(error).__name__} as this request began")
            failure.__cause__ = error
            QueuedEvents.put([(events, failure)])
        else:
            self._listeners[key], self._keys[events] = events, key

    def _end(self, key: int) -> None:
        del self._keys[self._listeners.pop(key)]

    def _fail_all(self, failure: RequestFailed) -> None:
        for key, listener in list(self._listeners.items()):
            self._engine.cancel(key)
            QueuedEvents.put([(listener, failure)])
            self._end(key)
        self._status = self._engine.status()


def _requests(inbox: Iterable[tuple[EngineRequest | None, QueuedEvents]]) -> int:
    """Number of requests in an inbox; the other items are cancellations."""
    return sum(request is not None for request, _ in inbox)
