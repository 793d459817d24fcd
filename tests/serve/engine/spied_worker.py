"""The real engine after a window: requests that were submitted, a gate that holds it, and a failure on demand."""

import threading
from time import sleep
from unittest import mock

from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import EngineLimits, EngineRequest, RequestOutput

# Bytes of K/V: a test's requests are short, and engines that were closed are not collected at once.
KV = 2**25


class Ticket:
    """The events of one request; `cancelled` once they were closed before their end."""

    def __init__(self, request: EngineRequest, events) -> None:
        self.request, self.cancelled = request, False
        self._events, self._ended = events, False

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            event = await anext(self._events)
        except Exception:
            self._ended = True
            raise
        self._ended = isinstance(event, RequestOutput)
        return event

    async def aclose(self) -> None:
        self.cancelled |= not self._ended
        await self._events.aclose()


class HeldEngine(Engine):
    """Runs no pass while its gate is shut, but takes requests in and forgets them."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.gate = threading.Event()
        self.gate.set()
        # what the next request raises
        self.fails: Exception | None = None
        # for a permit of which each token waits
        self.tokens: threading.Semaphore | None = None
        # seconds that every pass takes at least
        self.pause = 0.0

    def step(self):
        sleep(self.pause)
        if not self.gate.is_set() or (self.tokens is not None and not self.tokens.acquire(blocking=False)):
            events = self._schedule()
            sleep(0.002)
            return events
        events = super().step()
        while self.tokens is not None and not events:
            events = super().step()
        return events

    def submit(self, request, grammar=None, key=None):
        key = super().submit(request, grammar, key)
        failing, self.fails = self.fails, None
        if failing is not None:
            self._states[key].detokenizer.add = mock.Mock(side_effect=failing)
        return key


class SpiedService(EngineService):
    """A service of a held engine, with the tickets of all requests that were submitted."""

    def __init__(self, model, tokenizer, limit: int | None = None) -> None:
        limits = EngineLimits(kv_bytes=KV) if limit is None else EngineLimits(1, limit, kv_bytes=KV)
        self.held = HeldEngine(model, tokenizer, "pocket", limits)
        self.gate = self.held.gate
        self.tickets: list[Ticket] = []
        super().__init__(self.held)

    def submit(self, request: EngineRequest) -> Ticket:
        ticket = Ticket(request, super().submit(request))
        self.tickets.append(ticket)
        return ticket
