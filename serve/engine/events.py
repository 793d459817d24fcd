"""Events of one request on the event loop of its caller, put there by another thread."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from sigma0.serve.engine.messages import Event, RequestOutput, TokenOutput
from sigma0.serve.engine.queues import Mailbox

_LOG = logging.getLogger(__name__)

Delivery = tuple["QueuedEvents", Event]


class QueuedEvents:
    """`sigma0.serve.engine.messages.RequestEvents` of one request, filled by the thread that hears from the engine.

    Args:
        loop: Event loop of the caller.
        cancel: Cancels the request in the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None]) -> None:
        self._loop = loop
        self._cancel = cancel
        self._events: Mailbox[Event] = Mailbox()
        self._take: Callable[[Event], None] = self._events.put
        self._is_over = False

    @staticmethod
    def put(deliveries: Sequence[Delivery]) -> None:
        """Adds events, in one call for each event loop; called from any thread."""
        for loop in {listener._loop for listener, _ in deliveries}:
            own = [delivery for delivery in deliveries if delivery[0]._loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, own)
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
