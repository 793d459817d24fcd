"""Loop of an engine: takes commands in between passes and reports what came of them; in a thread or a process."""

import logging
import traceback
from collections.abc import Callable

from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.inbox import Inbox
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    Event,
    RequestCutOff,
    RequestFailed,
    TokenOutput,
)
from sigma0.serve.engine.wire import Cancel, Close, Command, Drain, Look, PassReport, Submit

_LOG = logging.getLogger(__name__)


class EngineLoop:
    """Runs the passes of an engine, in the thread that calls `run`.

    Args:
        engine: Owned by that thread.
        inbox: Where commands come from.
        report: Called after a pass that has output, and after commands.
    """

    def __init__(self, engine: Engine, inbox: Inbox[Command], report: Callable[[PassReport], None]) -> None:
        self._engine, self._inbox, self._report = engine, inbox, report
        self._taken = 0
        self._is_draining = self._is_closed = self._is_looked_at = False
        # the service's numbers of requests by the engine's, and the other way round
        self._keys: dict[int, int] = {}
        self._engine_keys: dict[int, int] = {}

    def run(self) -> None:
        """Runs until it is drained or closed."""
        while not self._is_over:
            commands = self._inbox.take(wait=not self._engine.has_work)
            events = [event for command in commands for event in self._obey(command)]
            if self._engine.has_work and not self._is_closed:
                events += self._pass()
            if commands or events:
                self._tell(events)
        self._tell(self._fail_all(RequestCutOff("the server is being shut down")))

    @property
    def _is_over(self) -> bool:
        return self._is_closed or (self._is_draining and not self._engine.has_work)

    def _tell(self, events: list[tuple[int, Event]]) -> None:
        slots = self._engine.slots() if self._is_looked_at else None
        self._is_looked_at = False
        self._report(PassReport(tuple(events), self._engine.status(), self._taken, slots))

    def _obey(self, command: Command) -> list[tuple[int, Event]]:
        match command:
            case Submit(key, request):
                self._taken += 1
                return self._submit(key, request)
            case Cancel(key):
                if key in self._engine_keys:
                    self._engine.cancel(self._engine_keys[key])
                    self._end(key)
            case Drain():
                self._is_draining = True
            case Close():
                self._is_closed = True
            case Look():
                self._is_looked_at = True
        return []

    def _submit(self, key: int, request: EngineRequest) -> list[tuple[int, Event]]:
        try:
            engine_key = self._engine.submit(request)
        except Busy as error:
            return [(key, error)]
        except Exception as error:
            # caught here, since without its loop the service would neither answer nor end; the caller logs the cause
            kind = type(error).__name__
            return [(key, RequestFailed(f"{kind} as this request began", kind))]
        self._keys[engine_key], self._engine_keys[key] = key, engine_key
        return []

    def _pass(self) -> list[tuple[int, Event]]:
        try:
            passed = self._engine.step()
        except Exception as error:
            # a pass that breaks leaves no request in a known state;
            # the message is left out, since it may quote a prompt
            frames = "".join(traceback.format_tb(error.__traceback__))
            _LOG.error("a pass failed: %s; all requests under way end\n%s", type(error).__name__, frames)
            return self._fail_all(RequestFailed(f"{type(error).__name__} in the engine"))
        events: list[tuple[int, Event]] = [(self._keys[engine_key], event) for engine_key, event in passed]
        for key, event in events:
            if not isinstance(event, TokenOutput):
                self._end(key)
        return events

    def _end(self, key: int) -> None:
        del self._keys[self._engine_keys.pop(key)]

    def _fail_all(self, failure: RequestFailed) -> list[tuple[int, Event]]:
        keys = list(self._engine_keys)
        for key in keys:
            self._engine.cancel(self._engine_keys[key])
            self._end(key)
        return [(key, failure) for key in keys]
