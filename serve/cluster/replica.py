"""Replica: one engine in its own process; requests in, and their events back as a stream.

Weights are loaded by `sigma0.load`: on a CPU, in the dtype that they are stored in, tensors are views of the
memory-mapped file, so that all replicas of a node share one copy in the page cache.
"""

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from ray import serve

from sigma0.commands.console import log_to_stderr
from sigma0.serve.cluster.cluster import bind_to_loopback
from sigma0.serve.cluster.router import EngineReport
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.loop import EngineService
from sigma0.serve.engine.messages import Busy, EngineRequest, RequestFailed, RequestOutput, SlotView, TokenOutput

_LOG = logging.getLogger(__name__)
# Seconds without a report to a front after which it is taken for gone: Ray lets its requests run on.
SILENCE = 60.0


@dataclass(frozen=True)
class Accepted:
    """An engine has queued a request."""

    engine: str  # Its name


@dataclass(frozen=True)
class Refused:
    """An engine is full; another one may take the request."""

    engine: str  # Its name
    reason: str  # In a sentence


@dataclass(frozen=True)
class Failed:
    """A request failed."""

    reason: str  # In a sentence that holds nothing of a prompt


ReplicaEvent = Accepted | Refused | Failed | TokenOutput | RequestOutput


class EngineReplica:
    """Deployment of an engine; Serve makes one in each replica's process.

    Args:
        settings: Of the application.
    """

    def __init__(self, settings: RaySettings) -> None:
        log_to_stderr()
        bind_to_loopback()
        self._settings = settings
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._service = EngineService(self._engine(), settings.threads)
        self._before = self._service.status()
        self._last_report: dict[str, float] = {}

    def _engine(self) -> Engine:
        return self._settings.engine.build()

    async def run(self, request: EngineRequest, front: str) -> AsyncIterator[ReplicaEvent]:
        """Events of a request: accepted or refused, then its tokens, then its output. Closing it cancels the request.

        Args:
            request: The request.
            front: Id of the sender; the request is cancelled once that front has fetched no report for a while.
        """
        self._last_report.setdefault(front, time.monotonic())
        try:
            events = self._service.submit(request)
        except Busy as error:
            yield Refused(self._name, str(error))
            return
        try:
            yield Accepted(self._name)
            async for event in events:
                if time.monotonic() - self._last_report[front] > SILENCE:
                    _LOG.warning("a front is gone; its request is cancelled")
                    return
                yield event
        except Busy as error:
            yield Refused(self._name, str(error))
        except RequestFailed as error:
            cause = f", by {error.cause}" if error.cause else ""
            _LOG.error("a request failed: %s%s", error, cause)
            yield Failed(str(error))
        finally:
            await events.aclose()

    def report(self, front: str) -> EngineReport:
        """The report of this engine.

        Args:
            front: Id of the caller.
        """
        self._last_report[front] = time.monotonic()
        limits = self._settings.limits
        capacity = limits.max_running + limits.max_waiting
        return EngineReport(self._name, limits.max_running, capacity, self._service.status())

    async def slots(self) -> tuple[SlotView, ...]:
        """The requests in this engine, with its name."""
        return tuple(replace(slot, engine=self._name) for slot in await self._service.slots())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Rows per pass since the last call; called by Serve at intervals."""
        before, self._before = self._before, self._service.status()
        passes, rows = self._before.passes - before.passes, self._before.rows - before.rows
        return {"rows": rows / passes if passes else 0.0}

    def check_health(self) -> None:
        """Called by Serve at intervals.

        Raises:
            RuntimeError: If the engine's thread has ended; Serve then replaces the replica.
        """
        if not self._service.is_up:
            raise RuntimeError("the engine's thread has ended")

    def __del__(self) -> None:
        """Called by Serve at the end, when its requests are finished."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
