"""Loop of an engine: takes commands in between passes and reports what came of them; in a thread or a process.

Grammars are compiled in threads beside it, in which others go on: what takes long, the API has refused before.
"""

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from sigma0.decode.grammar.compiled import CompiledGrammar
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
from sigma0.serve.engine.wire import Cancel, Close, Command, Compiled, Drain, Look, PassReport, Submit

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
        # requests whose grammar is being compiled, by the service's numbers
        self._compiling: dict[int, tuple[EngineRequest, Future[CompiledGrammar | None]]] = {}
        self._compiler = ThreadPoolExecutor(4, thread_name_prefix="grammars")

    def run(self) -> None:
        """Runs until it is drained or closed."""
        while not self.is_over:
            self.turn()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._tell(self._fail_all(RequestCutOff("the server is being shut down")))

    def turn(self, wait: bool = True) -> None:
        """Takes the commands that are there, runs a pass if there is work, and reports.

        Args:
            wait: Whether to wait for a command where there is no work.
        """
        commands = self._inbox.take(wait=wait and not self._engine.has_work)
        events = [event for command in commands for event in self._obey(command)]
        if self._engine.has_work and not self._is_closed:
            events += self._pass()
        if commands or events:
            self._tell(events)

    @property
    def is_over(self) -> bool:
        """Whether it was drained or closed."""
        return self._is_closed or (self._is_draining and not self._engine.has_work and not self._compiling)

    def _tell(self, events: list[tuple[int, Event]]) -> None:
        slots = self._engine.slots() if self._is_looked_at else None
        self._is_looked_at = False
        status = self._engine.status()
        status = replace(status, waiting=status.waiting + len(self._compiling))
        self._report(PassReport(tuple(events), status, self._taken, slots))

    def _obey(self, command: Command) -> list[tuple[int, Event]]:
        match command:
            case Submit(key, request):
                self._taken += 1
                if request.grammar is None:
                    return self._submit(key, request)
                compiled = self._compiler.submit(self._engine.compile, request)
                self._compiling[key] = request, compiled
                compiled.add_done_callback(partial(self._have_compiled, key))
            case Compiled(key, grammar):
                if key in self._compiling:
                    request, _ = self._compiling.pop(key)
                    if isinstance(grammar, Exception):
                        return [(key, _failed(grammar))]
                    return self._submit(key, request, grammar)
            case Cancel(key):
                if key in self._compiling:
                    # one that nobody waits for any more would hold up those behind it
                    self._compiling.pop(key)[1].cancel()
                if key in self._engine_keys:
                    return self._cancel(key)
            case Drain():
                self._is_draining = True
            case Close():
                self._is_closed = True
            case Look():
                self._is_looked_at = True
        return []

    def _have_compiled(self, key: int, compiled: "Future[CompiledGrammar | None]") -> None:
        """Called in the thread that compiles."""
        if not compiled.cancelled():
            error = compiled.exception()
            if error is not None and not isinstance(error, Exception):
                # a panic of the library, say: whoever waits is told all the same
                error = RuntimeError(f"a grammar could not be compiled: {type(error).__name__}")
            self._inbox.put(Compiled(key, error or compiled.result()))

    def _submit(
        self, key: int, request: EngineRequest, grammar: CompiledGrammar | None = None
    ) -> list[tuple[int, Event]]:
        try:
            engine_key = self._engine.submit(request) if grammar is None else self._engine.submit(request, grammar)
        except Busy as error:
            return [(key, error)]
        except Exception as error:
            # caught here, since without its loop the service would neither answer nor end; the caller logs the cause
            return [(key, _failed(error))]
        self._keys[engine_key], self._engine_keys[key] = key, engine_key
        return []

    def _pass(self) -> list[tuple[int, Event]]:
        try:
            passed = self._engine.step()
        except Exception as error:
            return self._broke(error)
        events: list[tuple[int, Event]] = [(self._keys[engine_key], event) for engine_key, event in passed]
        for key, event in events:
            if not isinstance(event, TokenOutput):
                self._end(key)
        return events

    def _end(self, key: int) -> None:
        del self._keys[self._engine_keys.pop(key)]

    def _cancel(self, key: int) -> list[tuple[int, Event]]:
        engine_key = self._engine_keys[key]
        self._end(key)
        try:
            self._engine.cancel(engine_key)
        except Exception as error:
            return self._broke(error)
        return []

    def _broke(self, error: Exception) -> list[tuple[int, Event]]:
        """What breaks in the engine leaves no request in it in a known state: all end, and those that come are served.

        Where even that cannot be had, the loop ends, and the service with it.
        """
        # the message is left out, since it may quote a prompt
        frames = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("the engine failed: %s; all requests under way end\n%s", type(error).__name__, frames)
        failure = RequestFailed(f"{type(error).__name__} in the engine")
        keys = list(self._engine_keys)
        self._engine.reset()
        self._keys.clear()
        self._engine_keys.clear()
        return [(key, failure) for key in keys]

    def _fail_all(self, failure: RequestFailed) -> list[tuple[int, Event]]:
        keys = [*self._engine_keys, *self._compiling]
        self._compiling.clear()
        for key in list(self._engine_keys):
            self._engine.cancel(self._engine_keys[key])
            self._end(key)
        return [(key, failure) for key in keys]


def _failed(error: Exception) -> RequestFailed:
    kind = type(error).__name__
    return RequestFailed(f"{kind} as this request began", kind)
