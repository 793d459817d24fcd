"""Several engines as one: which are up, what each holds, and which takes the next job. No Ray here.

A chat goes back to the engine that read its last prompt, as long as that one could begin it at once or has no more to
do than the others; everything else goes where least is open, in turn where that is equal. An engine is full once as
many jobs are open as it runs and lets wait.
"""

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count

from sigma0.serve.cluster.sessions import SessionTable
from sigma0.serve.engine.messages import Busy, ServiceStatus, Unavailable

NOTHING = ServiceStatus(*(0 for _ in fields(ServiceStatus)))
# What only ever grows: an engine that is gone has done it all the same.
COUNTERS = ("passes", "rows", "tokens", "exit_loops", "preemptions")


@dataclass(frozen=True)
class EngineReport:
    """What an engine says of itself.

    Attributes:
        engine: Its name, which no other ever has.
        max_running: Jobs that it runs at most.
        capacity: Jobs that it runs or lets wait at most.
        status: How it stands.
    """

    engine: str
    max_running: int
    capacity: int
    status: ServiceStatus


class Fleet:
    """Engines by name. Safe for threads.

    Args:
        sessions: Where chats were read; by default a table of its own.
    """

    def __init__(self, sessions: SessionTable | None = None) -> None:
        self._sessions = sessions or SessionTable()
        self._lock = threading.Lock()
        self._up: dict[str, EngineReport] = {}
        self._ever: dict[str, ServiceStatus] = {}
        self._open: Counter[str] = Counter()
        self._turns = count(1)
        self._last_turn: dict[str, int] = {}

    def update(self, reports: Sequence[EngineReport]) -> None:
        """The engines that are up now; others are gone."""
        with self._lock:
            self._up = {report.engine: report for report in reports}
            self._ever.update({report.engine: report.status for report in reports})

    def lose(self, engine: str) -> None:
        """Forgets an engine until it reports again."""
        with self._lock:
            self._up.pop(engine, None)

    @property
    def is_up(self) -> bool:
        """Whether there is any."""
        return bool(self._up)

    @property
    def open(self) -> int:
        """Jobs that were taken and are not over."""
        with self._lock:
            return self._open.total()

    def take(self, ids: Sequence[int], avoid: Collection[str] = (), root: bytes = b"") -> str:
        """Chooses the engine of a job, and counts the job there until `give`.

        Args:
            ids: Its prompt.
            avoid: Engines that have refused it.
            root: Of its pages, see `SessionTable.find`.

        Raises:
            Unavailable: If none is up.
            Busy: If all are full.
        """
        with self._lock:
            if not self._up:
                raise Unavailable("no engine is up")
            free = {
                name: self._open[name]
                for name, report in self._up.items()
                if name not in avoid and self._open[name] < report.capacity
            }
            if not free:
                raise Busy(f"{self._open.total()} requests are running or waiting already")
            engine = self._choose(ids, free, root)
            self._open[engine] += 1
            self._last_turn[engine] = next(self._turns)
            self._sessions.note(ids, engine, root)
            return engine

    def _choose(self, ids: Sequence[int], free: Mapping[str, int], root: bytes) -> str:
        home = self._sessions.find(ids, root)
        if home is not None and home in free:
            begins_at_once = free[home] < self._up[home].max_running
            if begins_at_once or free[home] == min(free.values()):
                return home
        return min(free, key=lambda name: (free[name], self._last_turn.get(name, 0), name))

    def move(self, ids: Sequence[int], engine: str, other: str, root: bytes = b"") -> None:
        """A job that was taken for one engine is at another."""
        with self._lock:
            self._open[other] += 1
            self._sessions.note(ids, other, root)
        self.give(engine)

    def give(self, engine: str) -> None:
        """A job is over."""
        with self._lock:
            self._open[engine] -= 1
            assert self._open[engine] >= 0, f"{engine} had no job"
            if not self._open[engine]:
                del self._open[engine]

    def engines(self) -> dict[str, ServiceStatus]:
        """How each stands that is up."""
        return {name: report.status for name, report in self._up.items()}

    def status(self) -> ServiceStatus:
        """How they stand together; what was done counts also of those that are gone."""
        with self._lock:
            now, ever = [report.status for report in self._up.values()], list(self._ever.values())
        sums = {
            each.name: sum(getattr(status, each.name) for status in (ever if each.name in COUNTERS else now))
            for each in fields(ServiceStatus)
        }
        return replace(NOTHING, **sums)
