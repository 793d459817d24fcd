"""The engines of a Ray cluster as one `messages.Service`: jobs go to replicas, and their events come back.

A job whose replica is lost before anything of it was told begins anew on another one, once; of one that was told of in
part the client hears that it failed. A replica that refuses a job is passed over.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import torch
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from sigma0.decode.paged_kv import PageShape
from sigma0.serve.cluster.replica import Accepted, Failed, Refused, ReplicaEvent, model_name
from sigma0.serve.cluster.router import Fleet
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.engine.block_pool import root_hash
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestFailed,
    RequestOutput,
    ServiceStatus,
    TokenOutput,
    check_request,
    context_length,
)

_LOG = logging.getLogger(__name__)
# seconds for a replica to report; one that hangs longer is passed over until it does
PATIENCE = 10.0


class EngineLost(Exception):
    """The stream of a job broke off with its replica."""


class RemoteEvents:
    """`sigma0.serve.engine.messages.RequestEvents` of a job on a replica. To be made on an event loop.

    Args:
        job: What is asked.
        fleet: Chooses replicas.
        begin: Sends the job to a replica by name; returns its stream.

    Raises:
        Busy: If all replicas are full.
        Unavailable: If there is none.
    """

    def __init__(self, job: EngineRequest, fleet: Fleet, begin: Callable[[EngineRequest, str], Any]) -> None:
        self._job, self._fleet, self._begin = job, fleet, begin
        self._refused: set[str] = set()
        self._was_lost = False
        self._told = self._again = 0
        self._is_over = False
        self._engine = ""
        self._stream = self._sent()

    def __aiter__(self) -> "RemoteEvents":
        return self

    async def __anext__(self) -> TokenOutput | RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._next()
        except Exception:
            self._end()
            raise
        if isinstance(event, RequestOutput):
            self._end()
        return event

    async def _next(self) -> TokenOutput | RequestOutput:
        while True:
            try:
                event = await _pulled(self._stream)
            except EngineLost:
                self._begin_anew()
                continue
            if isinstance(event, Accepted):
                self._come_to(event.engine)
            elif isinstance(event, Refused):
                self._come_to(event.engine)
                self._pass_over(event.why)
            elif isinstance(event, Failed):
                raise RequestFailed(event.why)
            elif isinstance(event, TokenOutput) and self._again:
                # of a job that began anew: the caller has it
                self._again -= 1
            else:
                self._told += isinstance(event, TokenOutput)
                return event

    def _come_to(self, engine: str) -> None:
        """The replica that has the job, which is another one where the one it was meant for was just gone."""
        if engine != self._engine:
            self._fleet.move(self._job.prompt_ids, self._engine, engine, root_hash(self._job.cache_salt))
            self._engine = engine

    def _pass_over(self, why: str) -> None:
        if self._engine in self._refused:
            # it came back to one that had refused it: there is no other
            raise Busy(why)
        self._refused.add(self._engine)
        self._stream = self._sent()

    def _begin_anew(self) -> None:
        self._fleet.lose(self._engine)
        if self._was_lost or (self._told and not self._job.whole):
            raise RequestFailed("its engine was lost")
        # a job that itself ends every process it comes to must not end them all
        self._was_lost = True
        self._again = self._told
        _LOG.warning("an engine was lost; a job of its begins anew on another one")
        self._stream = self._sent()

    def _sent(self) -> Any:
        """The stream of the job on the replica that is chosen now."""
        self._leave()
        self._engine = self._fleet.take(self._job.prompt_ids, self._refused, root_hash(self._job.cache_salt))
        try:
            return self._begin(self._job, self._engine)
        except Exception:
            self._leave()
            raise

    def _leave(self) -> None:
        engine, self._engine = self._engine, ""
        if engine:
            self._fleet.give(engine)

    def _end(self) -> None:
        self._is_over = True
        self._leave()

    async def aclose(self) -> None:
        """Cancels the job; one that is over stays as it was."""
        if not self._is_over:
            self._end()
            self._stream.cancel()


async def _pulled(stream: Any) -> ReplicaEvent:
    """The next event of a stream.

    Raises:
        EngineLost: If its replica died, or was ended with the job in it.
        RequestFailed: If something broke in the replica that nobody foresaw.
    """
    # in a task of its own: a stream that the cluster cancels raises what also tells this task that it is cancelled
    pull = asyncio.ensure_future(anext(stream))
    try:
        await asyncio.wait({pull})
    finally:
        pull.cancel()
    if pull.cancelled():
        raise EngineLost
    try:
        event: ReplicaEvent = pull.result()
    except RayTaskError as error:
        raise RequestFailed(f"{type(error.cause).__name__} in a replica") from error
    except (RayError, RayServeException) as error:
        raise EngineLost from error
    except StopAsyncIteration as error:
        raise EngineLost from error
    return event


class RayService:
    """See `sigma0.serve.engine.messages.Service`.

    Args:
        handle: Of the deployment of replicas.
        model: The looped model, of which no weights are needed, in the dtype that it is stored in.
        tokenizer: Its tokenizer.
        settings: Of the application.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Tokens that prompt and answer may have together.
        fleet: The replicas.

    Raises:
        ValueError: If the K/V hold no page.
    """

    def __init__(self, handle: DeploymentHandle, model: Any, tokenizer: Any, settings: RaySettings) -> None:
        self.name, self.model, self.tokenizer = model_name(settings), model, tokenizer
        dtype = model.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        pages = PageShape.of(model, settings.page_size).count_in(settings.kv_memory, dtype)
        self.context = context_length(model, pages, settings.page_size)
        self.fleet = Fleet()
        self._handle = handle
        self._period = settings.report_seconds
        self._front = uuid4().hex
        self._is_draining = False
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sigma0-replicas", daemon=True)
        self._watcher.start()

    def submit(self, job: EngineRequest) -> RemoteEvents:
        """Sends a job at once. Must be called on an event loop.

        Raises:
            ValueError: For a job that can never run.
            Busy: Where no more jobs are taken.
            Unavailable: Where no replica is up.
        """
        check_request(job, self.model, self.context)
        if self._is_draining:
            raise Busy("the server is being shut down")
        return RemoteEvents(job, self.fleet, self._begin)

    def _begin(self, job: EngineRequest, engine: str) -> Any:
        stream = self._handle.options(method_name="run", stream=True, session_id=engine)
        # Serve tells requests apart by a name in the context, and all jobs of an HTTP request would have the same
        return contextvars.Context().run(stream.remote, job, self._front)

    @property
    def is_up(self) -> bool:
        """Whether a replica is up."""
        return self.fleet.is_up

    def status(self) -> ServiceStatus:
        """How the replicas stood together when they were asked last."""
        return self.fleet.status()

    def engines(self) -> Mapping[str, ServiceStatus]:
        """How each replica stood when it was asked last."""
        return self.fleet.engines()

    async def drain(self) -> None:
        """Takes no more jobs and returns once all that were taken are over; replicas stay."""
        self._is_draining = True
        while self.fleet.open:
            await asyncio.sleep(0.05)
        self._is_closed.set()

    def close(self) -> None:
        """Asks the replicas no more."""
        self._is_closed.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._period if self.is_up else self._period / 10):
            try:
                answers = self._handle.broadcast("report", self._front).results(
                    timeout_s=PATIENCE, return_exceptions=True
                )
            except TimeoutError:
                # one hangs, of which Serve's health check decides; the others are where they were
                _LOG.warning("replicas did not report within %s seconds", PATIENCE)
                continue
            except Exception as error:
                # without this thread a front would never hear of a replica again
                if self.is_up:
                    _LOG.warning("replicas cannot be asked: %s", type(error).__name__)
                answers = []
            self.fleet.update([answer for answer in answers if not isinstance(answer, Exception)])
