"""Items spread over worker processes: each is done once, kept as soon as it is done, and redone once if a worker dies.

A function of a module takes an item of plain JSON values and returns such values. Processes are Ray's (extra `ray`):
those of a cluster that the variable RAY_ADDRESS names, else of one of this machine alone that is started for this.
"""

import json
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import typer
from filelock import FileLock, Timeout
from pydantic import JsonValue

from sigma0.bench.core.conditions import Strict
from sigma0.bench.core.lines import append, cut, parsed
from sigma0.errors import needs_extra
from sigma0.serve.cluster.cluster import join

Function = Callable[[Any], Any]
# How often an item is begun: a second time where the first worker died.
TRIES = 2
# Bytes of Ray's object store, the least that it takes: items and results are small.
_STORE = 80 * 2**20
_QUIET: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}


class WorkerLost(ValueError):
    """A worker died over an item twice."""


class KeptResult(Strict):
    """A line of the file of results."""

    key: str
    result: JsonValue


class KeptResults:
    """Results by item, in a file that a run which broke off goes on with.

    Use it as a context: one run at a time has the file. A last line that a killed run left half-written is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: dict[str, Any] = {}
        self._lock = FileLock(path.with_name(f"{path.name}.lock"))

    def __enter__(self) -> "KeptResults":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"another run keeps its results in {str(self._path)!r}: wait for its end") from error
        try:
            cut(self._path)
            kept = parsed(self._path, KeptResult.model_validate_json, "result")
        except ValueError:
            self._lock.release()
            raise
        self.results = {entry.key: entry.result for entry in kept}
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def add(self, key: str, result: Any) -> None:
        """Keeps a result for good."""
        append(self._path, KeptResult(key=key, result=result).model_dump_json().encode())
        self.results[key] = result

    def forget(self) -> None:
        """Removes the file: what it was kept for is done."""
        self.results.clear()
        self._path.unlink(missing_ok=True)


def key_of(function: Function, item: Any) -> str:
    """Name of a result: of the function and of the whole item."""
    output = json.dumps([f"{function.__module__}.{function.__qualname__}", item], sort_keys=True)
    return sha256(output.encode()).hexdigest()


@dataclass
class Pool:
    """Worker processes, see `worker_pool`."""

    workers: int  # How many
    cpus: int = 1  # Processors that each takes
    gpus: int = 0  # GPUs that each takes
    redone: int = field(default=0, init=False)  # Items that were begun anew since their worker died, so far

    def spread(
        self,
        function: Function,
        items: Sequence[Any],
        kept: KeptResults | None = None,
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[Any]:
        """Does all items, each by itself, but for those whose results were kept; `advance` is told how many are done.

        The results come as JSON gives them back. A worker that dies over the same item twice is a `WorkerLost`.
        """
        keys = [key_of(function, item) for item in items]
        known = {} if kept is None else kept.results
        obtained = {key: known[key] for key in keys if key in known}
        missing = {key: item for key, item in zip(keys, items, strict=True) if key not in obtained}
        advance(len(obtained))
        for key, result in self._each(function, missing):
            obtained[key] = result
            if kept is not None:
                kept.add(key, result)
            advance(len(obtained))
        return [obtained[key] for key in keys]

    def _each(self, function: Function, items: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        import ray
        from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

        # told by us, so that it is counted, and not by Ray
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)(function)
        waiting, begun = deque(items), Counter[str]()
        under_way: dict[Any, str] = {}
        while waiting or under_way:
            # one more than there are workers, so that none waits for the next item
            while waiting and len(under_way) <= self.workers:
                key = waiting.popleft()
                begun[key] += 1
                under_way[task.remote(items[key])] = key
            for reference in ray.wait(list(under_way))[0]:
                key = under_way.pop(reference)
                try:
                    result = ray.get(reference)
                except (WorkerCrashedError, NodeDiedError, OutOfMemoryError) as error:
                    if begun[key] >= TRIES:
                        why = type(error).__name__
                        raise WorkerLost(f"workers died over the same item {TRIES} times: {why}") from error
                    self.redone += 1
                    waiting.appendleft(key)
                except RayTaskError as error:
                    # its own words are the worker's whole traceback
                    if not isinstance(error.cause, ValueError):
                        raise
                    raise error.cause from error
                else:
                    yield key, json.loads(json.dumps(result))


@contextmanager
def worker_pool(workers: int, cpus: int = 1, gpus: int = 0) -> Iterator[Pool]:
    """Worker processes that take some CPUs and GPUs each, for as long as the context lasts.

    Raises:
        ValueError: For fewer than one, where Ray is not installed, or where no machine has what a worker takes.
    """
    if workers < 1:
        raise ValueError(f"at least one worker, got {workers}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("ray"), ExitStack() as stack:
        import ray

        if "RAY_ADDRESS" in os.environ:
            ray.init(**_QUIET)
            stack.callback(ray.shutdown)
        else:
            # sockets in it have paths of at most 107 characters
            folder = tempfile.TemporaryDirectory(prefix="s0-", dir="/tmp", ignore_cleanup_errors=True)
            room = {"num_cpus": workers * cpus, "object_store_memory": _STORE}
            join(None, **room, _temp_dir=stack.enter_context(folder), **_QUIET)
            stack.callback(ray.shutdown)
        check_room([node["Resources"] for node in ray.nodes() if node["Alive"]], cpus, gpus)
        yield Pool(workers, cpus, gpus)


@contextmanager
def keeping_pool(path: Path, what: str, workers: int, cpus: int, gpus: int) -> Iterator[tuple[Pool, KeptResults]]:
    """Worker processes, and a file in which their results are kept until all are there; tells what was redone."""
    with KeptResults(path) as kept, worker_pool(workers, cpus, gpus) as pool:
        yield pool, kept
        kept.forget()
    if pool.redone:
        typer.echo(f"{pool.redone} {what} were done again, since the worker that had them died", err=True)


def check_room(machines: Sequence[Mapping[str, float]], cpus: int, gpus: int) -> None:
    """Refuses what Ray would wait for without end: CPUs and GPUs of a worker that no machine of a cluster has."""
    if not any(has.get("CPU", 0) >= cpus and has.get("GPU", 0) >= gpus for has in machines):
        raise ValueError(
            f"a worker takes {cpus} CPUs and {gpus} GPUs, and no machine of the cluster has them: "
            "lower --threads, or choose another --device"
        )
