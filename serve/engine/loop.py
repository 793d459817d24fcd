"""Loop of an engine: takes commands in between passes and reports what came of them; in a thread or a process.

Grammars are compiled in threads beside it, and long contexts looked through in a process, while others go on.
"""

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.grounding import GroundingProcess
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    Event,
    RequestCutOff,
    RequestFailed,
    RequestOutput,
    TokenOutput,
)
from sigma0.serve.engine.outputs import UnjudgedOutput
from sigma0.serve.engine.queues import Inbox
from sigma0.serve.engine.wire import Cancel, Close, Command, Compiled, Drain, Judged, Look, PassReport, Submit

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
        # requests whose output has no verdict yet, by the service's numbers
        self._unjudged: dict[int, Future[RequestOutput]] = {}
        self._judge, self._grounding = ThreadPoolExecutor(1, thread_name_prefix="judging"), GroundingProcess()
        engine.defers_long = True

    def run(self) -> None:
        """Runs until it is drained or closed."""
        while not self.is_over:
            self.turn()
        for pool in (self._compiler, self._judge):
            pool.shutdown(wait=False, cancel_futures=True)
        self._grounding.close()
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
        waits = self._engine.has_work or self._compiling or self._unjudged
        return self._is_closed or (self._is_draining and not waits)

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
            case Judged(key, output):
                if self._unjudged.pop(key, None) is not None:
                    return [(key, _failed(output) if isinstance(output, Exception) else output)]
            case Cancel(key):
                if key in self._unjudged:
                    self._unjudged.pop(key).cancel()
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
        events: list[tuple[int, Event]] = []
        for engine_key, event in passed:
            key = self._keys[engine_key]
            if not isinstance(event, TokenOutput):
                self._end(key)
            if isinstance(event, UnjudgedOutput):
                self._unjudged[key] = self._judge.submit(event.judged, self._grounding.score)
                self._unjudged[key].add_done_callback(partial(self._have_judged, key))
            else:
                events.append((key, event))
        return events

    def _have_judged(self, key: int, judged: "Future[RequestOutput]") -> None:
        """Called in the thread that judges."""
        if not judged.cancelled():
            error = judged.exception()
            self._inbox.put(Judged(key, error if isinstance(error, Exception) else judged.result()))

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
        keys = [*self._engine_keys, *self._compiling, *self._unjudged]
        self._compiling.clear()
        self._unjudged.clear()
        for key in list(self._engine_keys):
            self._engine.cancel(self._engine_keys[key])
            self._end(key)
        return [(key, failure) for key in keys]


def _failed(error: Exception) -> RequestFailed:
    kind = type(error).__name__
    return RequestFailed(f"{kind} as this request began", kind)
