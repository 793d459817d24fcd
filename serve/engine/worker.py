"""The engine in a thread of its own, for callers on an event loop: jobs go in, and their events come back."""

import asyncio
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import (
    Busy,
    Job,
    JobCutOff,
    JobDone,
    JobFailed,
    ServiceStatus,
    ShuttingDown,
    TokenTold,
)

_LOG = logging.getLogger(__name__)
_Told = TokenTold | JobDone | JobFailed | Busy


class Events:
    """`sigma0.serve.engine.messages.JobEvents` of one job.

    Args:
        loop: Of the caller.
        cancel: Tells the engine that nobody wants the job any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[["Events"], None]) -> None:
        self._loop = loop
        self._cancel = cancel
        self._events: asyncio.Queue[_Told] = asyncio.Queue()
        self._is_over = False

    def hear(self, event: _Told) -> None:
        """Called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # the caller's loop is closed, so that nobody listens any more
            _LOG.debug("an event came for a closed loop")

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> TokenTold | JobDone:
        if self._is_over:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_over = not isinstance(event, TokenTold)
        if isinstance(event, JobFailed | Busy):
            raise event
        return event

    async def aclose(self) -> None:
        """Cancels the job; one that is over stays as it was."""
        if not self._is_over:
            self._is_over = True
            self._cancel(self)


class EngineService:
    """Runs an engine; `sigma0.serve.engine.messages.Service` says what callers see.

    Args:
        engine: Owned by the thread from here on.
        name: Of the model.
        threads: Of torch on a CPU, in the engine's thread; None: as torch has it.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Tokens that prompt and answer may have together.
    """

    def __init__(self, engine: Engine, name: str, threads: int | None = None) -> None:
        self.name = name
        self.model: Any = engine.model
        self.tokenizer: Any = engine.tokenizer
        self.context = engine.context
        self._engine = engine
        self._threads = threads
        self._listeners: dict[int, Events] = {}
        self._keys: dict[Events, int] = {}
        self._inbox: deque[tuple[Job | None, Events]] = deque()
        self._wake = threading.Condition()
        self._status = engine.status()
        self._entering = 0
        self._is_draining = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sigma0-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Events:
        """Queues a job at once. Must be called on an event loop.

        Raises:
            ValueError: For a job that can never run.
            Busy: Where no more jobs are taken.
        """
        self._engine.check(job)
        with self._wake:
            if self._is_draining or self._is_closed:
                raise ShuttingDown("the server is being shut down")
            # jobs that the engine has not seen yet count as well, and those that can begin at once do not
            waiting = self._status.waiting + self._entering + _jobs(self._inbox)
            limits = self._engine.limits
            if waiting >= limits.max_waiting + limits.max_running - self._status.running:
                raise Busy(f"{waiting} requests are waiting already")
            events = Events(asyncio.get_running_loop(), self._cancel)
            self._inbox.append((job, events))
            self._wake.notify()
        return events

    def _cancel(self, events: Events) -> None:
        with self._wake:
            self._inbox.append((None, events))
            self._wake.notify()

    @property
    def is_up(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def status(self) -> ServiceStatus:
        """How the engine stood behind its last pass."""
        return self._status

    def engines(self) -> Mapping[str, ServiceStatus]:
        """None beside the one that `status` tells of."""
        return {}

    async def drain(self) -> None:
        """Takes no more jobs and returns once all that were taken are over."""
        with self._wake:
            self._is_draining = True
            self._wake.notify()
        while self._thread.is_alive():
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Ends the thread, whatever it is at; jobs under way fail."""
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
                # a pass that breaks leaves no request in a known state
                # without what it says, which may quote a prompt
                frames = "".join(traceback.format_tb(error.__traceback__))
                _LOG.error("a pass failed: %s; all requests under way end\n%s", type(error).__name__, frames)
                self._fail_all(JobFailed(f"{type(error).__name__} in the engine"))
                continue
            self._status = self._engine.status()
            for key, event in events:
                self._listeners[key].hear(event)
                if isinstance(event, JobDone | JobFailed):
                    self._end(key)
        self._fail_all(JobCutOff("the server is being shut down"))

    def _take_in(self) -> bool:
        """Waits for work and takes it in; False once there is to be none any more."""
        with self._wake:
            while not (self._inbox or self._engine.has_work or self._is_draining or self._is_closed):
                self._wake.wait()
            inbox = list(self._inbox)
            self._inbox.clear()
            self._entering = _jobs(inbox)
            closing = self._is_closed or (self._is_draining and not inbox and not self._engine.has_work)
        for job, events in inbox:
            if job is not None:
                self._begin(job, events)
            elif events in self._keys:
                key = self._keys[events]
                self._engine.cancel(key)
                self._end(key)
        with self._wake:
            self._status, self._entering = self._engine.status(), 0
        return not closing

    def _begin(self, job: Job, events: Events) -> None:
        try:
            key = self._engine.submit(job)
        except Busy as error:
            events.hear(error)
        except Exception as error:
            # without its thread the service would neither answer nor end: whoever asked logs what it was
            failed = JobFailed(f"{type(error).__name__} as this request began")
            failed.__cause__ = error
            events.hear(failed)
        else:
            self._listeners[key], self._keys[events] = events, key

    def _end(self, key: int) -> None:
        del self._keys[self._listeners.pop(key)]

    def _fail_all(self, why: JobFailed) -> None:
        for key, listener in list(self._listeners.items()):
            self._engine.cancel(key)
            listener.hear(why)
            self._end(key)
        self._status = self._engine.status()


def _jobs(inbox: Iterable[tuple[Job | None, Events]]) -> int:
    """How many of these are jobs; the others take one back."""
    return sum(job is not None for job, _ in inbox)
