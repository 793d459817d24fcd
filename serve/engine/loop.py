"""Loop of an engine: takes commands in between passes and reports what came of them; in a thread or a process.

Grammars are compiled in threads beside it, and long contexts looked through in a process, while others go on.
"""

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from sigma0.decode.grammar.compiled import CompiledGrammar
from sigma0.serve.engine.client import EngineClient
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.grounding import GroundingProcess
from sigma0.serve.engine.messages import Busy, EngineRequest, Event, RequestCutOff, RequestFailed
from sigma0.serve.engine.outputs import Unjudged
from sigma0.serve.engine.wire import Cancel, Command, Done, EngineFacts, PassReport, Submit, Tell, take_all

_LOG = logging.getLogger(__name__)
Events = list[tuple[int, Event]]


class EngineLoop:
    """Runs the passes of an engine, in the thread that calls `run`.

    Args:
        engine: Owned by that thread.
        inbox: Where commands come from.
        report: Called after a pass that has output, and after commands.
    """

    def __init__(self, engine: Engine, inbox: "SimpleQueue[Command]", report: Callable[[PassReport], None]) -> None:
        self._engine, self._inbox, self._report = engine, inbox, report
        self._taken = 0
        self._is_draining = self._is_closed = self._is_looked_at = False
        # requests that wait for a thread beside this one, and what makes events of its result; None: it is the event
        self._put_off: dict[int, tuple[Future[Any], Callable[[Any], Events] | None]] = {}
        self._compiler = ThreadPoolExecutor(4, thread_name_prefix="grammars")
        self._judge, self._grounding = ThreadPoolExecutor(1, thread_name_prefix="judging"), GroundingProcess()
        engine.defers_long = True

    def run(self) -> None:
        """Runs until it is drained or closed."""
        while not self.is_over:
            self.turn()
        for pool in (self._compiler, self._judge):
            pool.shutdown(wait=False, cancel_futures=True)
        self._grounding.close()
        cut_off = RequestCutOff("the server is being shut down")
        keys = [*(self._engine.reset() if self._engine.has_work else ()), *self._put_off]
        self._put_off.clear()
        self._tell([(key, cut_off) for key in keys])

    def turn(self, wait: bool = True) -> None:
        """Takes the commands that are there, runs a pass if there is work, and reports.

        Args:
            wait: Whether to wait for a command where there is no work.
        """
        commands = take_all(self._inbox, wait and not self._engine.has_work)
        events = [event for command in commands for event in self._obey(command)]
        if self._engine.has_work and not self._is_closed:
            events += self._pass()
        if commands or events:
            self._tell(events)

    @property
    def is_over(self) -> bool:
        """Whether it was drained or closed."""
        return self._is_closed or (self._is_draining and not (self._engine.has_work or self._put_off))

    def _tell(self, events: Events) -> None:
        slots = self._engine.slots() if self._is_looked_at else None
        self._is_looked_at = False
        status = self._engine.status()
        begin = sum(then is not None for _, then in self._put_off.values())
        self._report(PassReport(tuple(events), replace(status, waiting=status.waiting + begin), self._taken, slots))

    def _obey(self, command: Command) -> Events:
        match command:
            case Submit(key, request):
                self._taken += 1
                if request.grammar is None:
                    return self._submit(key, request)
                then = partial(self._submit, key, request)
                self._put_off_until(key, self._compiler.submit(self._engine.compile, request), then)
            case Done(key) if key in self._put_off:
                done, begin = self._put_off.pop(key)
                if error := done.exception():
                    return [(key, _failed(error))]
                return [(key, done.result())] if begin is None else begin(done.result())
            case Cancel(key) if key in self._put_off:
                # one that nobody waits for any more would hold up those after it
                self._put_off.pop(key)[0].cancel()
            case Cancel(key):
                try:
                    self._engine.cancel(key)
                except Exception as error:
                    return self._broke(error)
            case Tell.DRAIN:
                self._is_draining = True
            case Tell.CLOSE:
                self._is_closed = True
            case Tell.LOOK:
                self._is_looked_at = True
        return []

    def _put_off_until(self, key: int, future: "Future[Any]", then: Callable[[Any], Events] | None) -> None:
        self._put_off[key] = future, then
        future.add_done_callback(lambda _: self._inbox.put(Done(key)))

    def _submit(self, key: int, request: EngineRequest, grammar: CompiledGrammar | None = None) -> Events:
        try:
            self._engine.submit(request, grammar, key)
        except Exception as error:
            # caught here, since without its loop the service would neither answer nor end; the caller logs the cause
            return [(key, error if isinstance(error, Busy) else _failed(error))]
        return []

    def _pass(self) -> Events:
        try:
            passed = self._engine.step()
        except Exception as error:
            return self._broke(error)
        events: Events = []
        for key, event in passed:
            if isinstance(event, Unjudged):
                self._put_off_until(key, self._judge.submit(event.judge, self._grounding.score), None)
            else:
                events.append((key, event))
        return events

    def _broke(self, error: Exception) -> Events:
        """What breaks in the engine leaves no request in it in a known state: all end, and those that come are served.

        Where even that cannot be had, the loop ends, and the service with it.
        """
        # the message is left out, since it may quote a prompt
        frames = "".join(traceback.format_tb(error.__traceback__))
        _LOG.error("the engine failed: %s; all requests under way end\n%s", type(error).__name__, frames)
        failure = RequestFailed(f"{type(error).__name__} in the engine")
        return [(key, failure) for key in self._engine.reset()]


def _failed(error: BaseException) -> RequestFailed:
    kind = type(error).__name__
    return RequestFailed(f"{kind} as this request began", kind)


class EngineService(EngineClient):
    """A service of an engine in a thread of this process: for programs of one's own, or where its model is used beside.

    Args:
        engine: Owned by the thread from here on.
        threads: CPU threads of torch in the engine's thread; None: torch's default.
    """

    def __init__(self, engine: Engine, threads: int | None = None) -> None:
        super().__init__(EngineFacts.of(engine))
        self._engine, self._loop = engine, EngineLoop(engine, self._inbox, self._receive)
        self._threads = threads
        self._thread = threading.Thread(target=self._run, name="sigma0-engine", daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            self._loop.run()
        finally:
            self._lose("the engine's thread has ended")
