"""A replica: one engine in a process of its own, jobs in, and their events back as a stream.

Weights are read as `sigma0.load` reads them: on a CPU, in the dtype that they are stored in, a model's tensors are
views of the mapped file, so that all replicas of a node share the one copy in its page cache.
"""

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from ray import serve

from sigma0.commands.console import quiet_transformers
from sigma0.models.load import load
from sigma0.serve.cluster.cluster import bind_to_loopback
from sigma0.serve.cluster.router import EngineReport
from sigma0.serve.cluster.settings import RaySettings
from sigma0.serve.engine.engine import Engine
from sigma0.serve.engine.messages import Busy, EngineRequest, RequestFailed, RequestOutput, TokenOutput
from sigma0.serve.engine.worker import EngineService

_LOG = logging.getLogger(__name__)
# Seconds in which a front asks for a report, or is gone: Ray lets what it asked for run on.
SILENCE = 60.0


@dataclass(frozen=True)
class Accepted:
    """A job stands in an engine's queue.

    Attributes:
        engine: Which.
    """

    engine: str


@dataclass(frozen=True)
class Refused:
    """An engine takes no more jobs; another one may.

    Attributes:
        engine: Which.
        why: In a sentence.
    """

    engine: str
    why: str


@dataclass(frozen=True)
class Failed:
    """A job broke.

    Attributes:
        why: In a sentence that holds nothing of a prompt.
    """

    why: str


ReplicaEvent = Accepted | Refused | Failed | TokenOutput | RequestOutput


def model_name(settings: RaySettings) -> str:
    """What clients call the model."""
    return Path(settings.model).name if Path(settings.model).is_dir() else settings.model


class EngineReplica:
    """Serve makes one in each replica's process.

    Args:
        settings: Of the application.
    """

    def __init__(self, settings: RaySettings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        quiet_transformers()
        bind_to_loopback()
        self._settings = settings
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._service = EngineService(self._engine(), model_name(settings), settings.threads)
        self._before = self._service.status()
        self._heard: dict[str, float] = {}

    def _engine(self) -> Engine:
        settings = self._settings
        loaded = load(settings.model, device=settings.device, dtype=settings.dtype, backend=settings.backend)
        return Engine(*loaded, model_name(settings), settings.limits)

    async def run(self, job: EngineRequest, front: str) -> AsyncIterator[ReplicaEvent]:
        """A job's events: that it was taken or refused, then its tokens, then its end. Closing it cancels the job.

        Args:
            job: What is asked.
            front: Who asks. The job ends with it, once nothing has been heard of it for a while.
        """
        self._heard.setdefault(front, time.monotonic())
        try:
            events = self._service.submit(job)
        except Busy as error:
            yield Refused(self._name, str(error))
            return
        try:
            yield Accepted(self._name)
            async for event in events:
                if time.monotonic() - self._heard[front] > SILENCE:
                    _LOG.warning("a front is gone; a job of its is ended")
                    return
                yield event
        except Busy as error:
            yield Refused(self._name, str(error))
        except RequestFailed as error:
            cause = f", by {type(error.__cause__).__name__}" if error.__cause__ else ""
            _LOG.error("a job failed: %s%s", error, cause)
            yield Failed(str(error))
        finally:
            await events.aclose()

    def report(self, front: str) -> EngineReport:
        """What it says of itself.

        Args:
            front: Who asks.
        """
        self._heard[front] = time.monotonic()
        limits = self._settings.limits
        capacity = limits.max_running + limits.max_waiting
        return EngineReport(self._name, limits.max_running, capacity, self._service.status())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks now and then: rows of a pass since it asked last."""
        before, self._before = self._before, self._service.status()
        passes, rows = self._before.passes - before.passes, self._before.rows - before.rows
        return {"rows": rows / passes if passes else 0.0}

    def check_health(self) -> None:
        """Serve asks now and then.

        Raises:
            RuntimeError: If the engine has ended; the replica is then replaced.
        """
        if not self._service.is_up:
            raise RuntimeError("the engine's thread has ended")

    def __del__(self) -> None:
        """Serve asks at the end, when its jobs are over."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
