"""Router over several engines: which are up, the load of each, and which takes the next request. No Ray here.

A chat returns to the engine that prefilled its last prompt, whose K/V are cached there, as long as that engine could
start it at once or has no more load than the others; any other request goes to the least loaded engine, in turn where
that is equal. An engine is full once it has as many open requests as it runs and queues.
"""

import threading
from array import array
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import count

from sigma0.serve.engine.messages import Busy, ServiceStatus, Unavailable

# Prompts that a session table remembers.
SESSIONS = 2**16
NOTHING = ServiceStatus(*(0 for _ in fields(ServiceStatus)))
# Counters: those of an engine that is gone still count.
COUNTERS = ("passes", "rows", "tokens", "exit_loops", "preemptions")


@dataclass(frozen=True)
class EngineReport:
    """Report of an engine."""

    engine: str  # Its unique name
    max_running: int  # Requests that it runs at most
    capacity: int  # Requests that it runs or queues at most
    status: ServiceStatus  # Its gauges and counters


class SessionTable:
    """The engine that prefilled each prompt, by the hash of all its ids; least recently used prompts are dropped.

    Whole prompts are hashed, not their first blocks: chats that share a long system prompt stay distinct, and a new
    one may go to any engine.

    Args:
        limit: Number of prompts kept, at least 1.

    Raises:
        ValueError: For less.
    """

    def __init__(self, limit: int = SESSIONS) -> None:
        if limit < 1:
            raise ValueError(f"a table needs room for at least one prompt, got {limit}")
        self._limit = limit
        self._engines: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        # number of prompts of each length, and the lengths in order: only prefixes of these lengths are looked up
        self._counts: Counter[int] = Counter()
        self._lengths: list[int] = []

    def find(self, ids: Sequence[int], root: bytes = b"") -> str | None:
        """The engine that prefilled the longest known prefix of these ids; None where there is none.

        Args:
            ids: A prompt.
            root: Hash ahead of its first block (`sigma0.serve.engine.block_pool.root_hash`): prompts with another one
                share no block.
        """
        raw, engine, start = _raw(ids), None, 0
        hashed = blake2b(digest_size=16, key=root)
        for length in self._lengths:
            if length > len(ids):
                break
            hashed.update(raw[start:length])
            start = length
            digest = hashed.digest()
            if digest in self._engines:
                self._engines.move_to_end(digest)
                engine = self._engines[digest][0]
        return engine

    def note(self, ids: Sequence[int], engine: str, root: bytes = b"") -> None:
        """Records the engine that prefills a prompt."""
        digest = blake2b(_raw(ids), digest_size=16, key=root).digest()
        if digest not in self._engines:
            if not self._counts[len(ids)]:
                insort(self._lengths, len(ids))
            self._counts[len(ids)] += 1
        self._engines[digest] = engine, len(ids)
        self._engines.move_to_end(digest)
        if len(self._engines) > self._limit:
            _, (_, length) = self._engines.popitem(last=False)
            self._counts[length] -= 1
            if not self._counts[length]:
                del self._counts[length]
                self._lengths.remove(length)


class Fleet:
    """Engines by name. Safe for threads.

    Args:
        sessions: Engines of earlier prompts; by default an empty table.
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
        """Replaces the set of engines that are up."""
        with self._lock:
            self._up = {report.engine: report for report in reports}
            self._ever.update({report.engine: report.status for report in reports})

    def lose(self, engine: str) -> None:
        """Removes an engine until it reports again."""
        with self._lock:
            self._up.pop(engine, None)

    @property
    def is_up(self) -> bool:
        """Whether any engine is up."""
        return bool(self._up)

    @property
    def open(self) -> int:
        """Requests that were taken and are not finished."""
        with self._lock:
            return self._open.total()

    def take(self, ids: Sequence[int], avoid: Collection[str] = (), root: bytes = b"") -> str:
        """Chooses the engine of a request, and counts the request there until `give`.

        Args:
            ids: Its prompt.
            avoid: Engines that have refused it.
            root: Hash ahead of its first block, see `SessionTable.find`.

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
        """Moves a request that was counted for one engine to another."""
        with self._lock:
            self._open[other] += 1
            self._sessions.note(ids, other, root)
        self.give(engine)

    def give(self, engine: str) -> None:
        """Ends the count of a request."""
        with self._lock:
            self._open[engine] -= 1
            assert self._open[engine] >= 0, f"{engine} had no request"
            if not self._open[engine]:
                del self._open[engine]

    def engines(self) -> dict[str, ServiceStatus]:
        """Status of each engine that is up."""
        return {name: report.status for name, report in self._up.items()}

    def status(self) -> ServiceStatus:
        """Sum over the engines; counters include engines that are gone."""
        with self._lock:
            now, ever = [report.status for report in self._up.values()], list(self._ever.values())
        sums = {
            field.name: sum(getattr(status, field.name) for status in (ever if field.name in COUNTERS else now))
            for field in fields(ServiceStatus)
        }
        return replace(NOTHING, **sums)


def _raw(ids: Sequence[int]) -> memoryview:
    return memoryview(array("q", ids))
