"""The engines of a Ray cluster as one `messages.Service`: requests go to replicas, and their events come back.

A request whose replica is lost before any of its output was sent is restarted on another one, once; one that was sent
in part fails. A replica that refuses a request is skipped.
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
from transformers import PreTrainedTokenizerFast

from sigma0.decode.kv_store import BlockShape
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.stored_settings import StoredSettings
from sigma0.serve.cluster.replica import Accepted, Failed, Refused, ReplicaEvent
from sigma0.serve.cluster.router import Fleet
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.engine.block_pool import root_hash
from sigma0.serve.engine.messages import (
    Busy,
    EngineRequest,
    RequestFailed,
    RequestOutput,
    ServiceStatus,
    SlotView,
    TokenOutput,
    Unavailable,
    check_request,
    context_length,
)

_LOG = logging.getLogger(__name__)
# seconds for a replica to report; one that takes longer is skipped until it does
PATIENCE = 10.0


class EngineLost(Exception):
    """The stream of a request broke off with its replica."""


class RemoteEvents:
    """`sigma0.serve.engine.messages.RequestEvents` of a request on a replica. To be made on an event loop.

    Args:
        request: The request.
        fleet: Chooses replicas.
        send: Sends the request to a replica by name; returns its stream.

    Raises:
        Busy: If all replicas are full.
        Unavailable: If there is none.
    """

    def __init__(self, request: EngineRequest, fleet: Fleet, send: Callable[[EngineRequest, str], Any]) -> None:
        self._request, self._fleet, self._send_to = request, fleet, send
        self._refused: set[str] = set()
        self._was_lost = False
        self._tokens_sent = self._tokens_to_skip = 0
        self._is_over = False
        self._engine = ""
        self._stream = self._send()

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
                event = await _next_event(self._stream)
            except EngineLost:
                self._restart()
                continue
            if isinstance(event, Accepted):
                self._move_to(event.engine)
            elif isinstance(event, Refused):
                self._move_to(event.engine)
                self._skip(event.reason)
            elif isinstance(event, Failed):
                raise RequestFailed(event.reason)
            elif isinstance(event, TokenOutput) and self._tokens_to_skip:
                # of a restarted request: it was sent already
                self._tokens_to_skip -= 1
            else:
                self._tokens_sent += isinstance(event, TokenOutput)
                return event

    def _move_to(self, engine: str) -> None:
        """Notes the replica that took the request: another one where the chosen one was just lost."""
        if engine != self._engine:
            self._fleet.move(self._request.prompt_ids, self._engine, engine, root_hash(self._request.cache_salt))
            self._engine = engine

    def _skip(self, reason: str) -> None:
        if self._engine in self._refused:
            # it was routed again to a replica that had refused it: there is no other
            raise Busy(reason)
        self._refused.add(self._engine)
        self._stream = self._send()

    def _restart(self) -> None:
        self._fleet.lose(self._engine)
        if self._was_lost or (self._tokens_sent and not self._request.whole):
            raise RequestFailed("its engine was lost")
        # a request that crashes every process it runs in must not crash them all
        self._was_lost = True
        self._tokens_to_skip = self._tokens_sent
        _LOG.warning("an engine was lost; a request of it is restarted on another one")
        self._stream = self._send()

    def _send(self) -> Any:
        """Sends the request to a newly chosen replica; its stream."""
        self._leave()
        self._engine = self._fleet.take(self._request.prompt_ids, self._refused, root_hash(self._request.cache_salt))
        try:
            return self._send_to(self._request, self._engine)
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
        """Cancels the request; a finished one stays as it was."""
        if not self._is_over:
            self._end()
            self._stream.cancel()


async def _next_event(stream: Any) -> ReplicaEvent:
    """The next event of a stream.

    Raises:
        EngineLost: If its replica died, or was ended with the request in it.
        RequestFailed: If the replica raised an unexpected exception.
    """
    # in a separate task: a stream that the cluster cancels raises CancelledError, as cancelling this task would
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
    """A `sigma0.serve.engine.messages.Service` over the replicas of a deployment.

    Args:
        handle: Of the deployment.
        model: The looped model without weights, in the dtype that it is stored in.
        tokenizer: Its tokenizer.
        settings: Of the application.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Most tokens of prompt and answer together.
        fleet: The replicas.

    Raises:
        ValueError: If the K/V memory holds no block.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        model: DepthGenerationMixin,
        tokenizer: PreTrainedTokenizerFast,
        settings: RaySettings,
    ) -> None:
        self.name, self.tokenizer = settings.engine.name, tokenizer
        self.model: StoredSettings = model
        dtype = model.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
        blocks = BlockShape.of(model, settings.page_size).count_in(settings.kv_memory, dtype)
        self.context = context_length(model, blocks, settings.page_size)
        self.fleet = Fleet()
        self._handle = handle
        self._period = settings.report_seconds
        self._front = uuid4().hex
        self._is_draining = False
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sigma0-replicas", daemon=True)
        self._watcher.start()

    def submit(self, request: EngineRequest) -> RemoteEvents:
        """Sends a request at once. Must be called on an event loop.

        Raises:
            ValueError: For a request that can never run.
            Busy: Where no more requests are taken.
            Unavailable: Where no replica is up.
        """
        check_request(request, self.model, self.context)
        if self._is_draining:
            raise Busy("the server is being shut down")
        return RemoteEvents(request, self.fleet, self._send)

    def _send(self, request: EngineRequest, engine: str) -> Any:
        stream = self._handle.options(method_name="run", stream=True, session_id=engine)
        # Serve identifies requests by an id in the context, which all choices of an HTTP request would share
        return contextvars.Context().run(stream.remote, request, self._front)

    @property
    def is_up(self) -> bool:
        """Whether a replica is up."""
        return self.fleet.is_up

    def status(self) -> ServiceStatus:
        """Sum over the latest reports of the replicas."""
        return self.fleet.status()

    def engines(self) -> Mapping[str, ServiceStatus]:
        """The latest report of each replica."""
        return self.fleet.engines()

    async def slots(self) -> tuple[SlotView, ...]:
        """The requests in all replicas that answer.

        Raises:
            Unavailable: Where none does.
        """

        def ask() -> list[Any]:
            answers = self._handle.broadcast("slots").results(timeout_s=PATIENCE, return_exceptions=True)
            return [answer for answer in answers if not isinstance(answer, Exception)]

        answers = await asyncio.to_thread(ask)
        if not answers:
            raise Unavailable("no replica answers")
        return tuple(slot for answer in answers for slot in answer)

    async def drain(self) -> None:
        """Takes no more requests and returns once all that were taken are finished; replicas stay."""
        self._is_draining = True
        while self.fleet.open:
            await asyncio.sleep(0.05)
        self._is_closed.set()

    def close(self) -> None:
        """Stops fetching reports."""
        self._is_closed.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._period if self.is_up else self._period / 10):
            try:
                answers = self._handle.broadcast("report", self._front).results(
                    timeout_s=PATIENCE, return_exceptions=True
                )
            except TimeoutError:
                # one hangs, which Serve's health check handles; the last reports are kept
                _LOG.warning("replicas did not report within %s seconds", PATIENCE)
                continue
            except Exception as error:
                # without this thread the front would never see a replica again
                if self.is_up:
                    _LOG.warning("replicas cannot be reached: %s", type(error).__name__)
                answers = []
            self.fleet.update([answer for answer in answers if not isinstance(answer, Exception)])
