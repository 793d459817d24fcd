"""Copies of the tree, and in each a process that runs tests there."""

import compileall
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Item = TypeVar("Item")
_LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "*.jsonl.lock", ".mutants"
)
# those of forks.py, and what pytest returns
OTHER_TREE, BROKEN = 70, 71
PASSED, NOT_FOUND, NO_TESTS = 0, 4, 5


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended.

    Attributes:
        code: Exit code, negative for a signal; None where the time on the clock ran out.
        timed_out: Whether it ran out of its time, of the CPU or on the clock.
    """

    code: int | None
    timed_out: bool


def copy_tree(root: Path, folder: Path, copies: int) -> list[Path]:
    """Copies a tree as it stands, symbolic links as links, without git's and the caches' folders; compiled once.

    Args:
        root: The tree.
        folder: Where the copies are made, each a folder in it.
        copies: How many.
    """
    first, *others = (folder.resolve() / f"copy{number}" for number in range(copies))
    shutil.copytree(root, first, symlinks=True, ignore=_LEFT_OUT)
    compileall.compile_dir(first, quiet=2)
    for other in others:
        shutil.copytree(first, other, symlinks=True)
    return [first, *others]


class TestWorker:
    """Runs tests in a copy of the tree.

    Args:
        copy: One of `copy_tree`.
        shared: Modules of the tree that most tests import: what these import from elsewhere is imported once.
    """

    __test__ = False

    def __init__(self, copy: Path, shared: Sequence[str] = ()) -> None:
        self.copy = copy
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forks.py").resolve()), *shared],
            cwd=copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def __enter__(self) -> "TestWorker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """A source of the copy with another text, for a while; its age differs too, so that no .pyc stands for it."""
        path = self.copy / file
        old, times = path.read_bytes(), path.stat()
        path.write_text(text)
        os.utime(path, (times.st_atime + 10, times.st_mtime + 10))
        try:
            yield
        finally:
            path.write_bytes(old)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    @property
    def log(self) -> str:
        """What the last run printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def _log(self) -> Path:
        return self.copy.with_name(f"{self.copy.name}.log")

    def run(
        self,
        arguments: Sequence[str],
        cpu_seconds: float,
        wall_seconds: float,
        files: Sequence[str] = (),
        cover: dict[str, Any] | None = None,
    ) -> Ended:
        """Runs pytest.

        Args:
            arguments: Of pytest.
            cpu_seconds: After which it is ended.
            wall_seconds: The same, on the clock.
            files: Test files in the order in which they are to run.
            cover: Patterns of `sources`, and the file `out` that says which test runs which of their lines.

        Raises:
            ValueError: If the tests could not be run, or would have run another tree.
        """
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        job = {
            "arguments": [*arguments], "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds,
            "files": [*files], "cover": cover, "log": str(self._log),
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ended = Ended(**self._answer())
        if ended.code == OTHER_TREE:
            raise ValueError(f"sigma0 would be imported from elsewhere than {str(self.copy)!r}")
        if ended.code == BROKEN:
            raise ValueError(f"pytest could not be run: {self.log[-500:]}")
        return ended

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the process that runs tests in {str(self.copy)!r} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def spread(
    workers: Sequence[TestWorker], items: Sequence[Item], work: Callable[[TestWorker, Item], None], end: float
) -> list[Item]:
    """Has workers take items, each the next as it is free.

    Args:
        workers: Who work, in a thread each.
        items: What is to be done, in this order.
        work: What is done with an item.
        end: When no more is begun, on `time.monotonic`'s clock.

    Returns:
        The items that were not begun.

    Raises:
        Exception: What `work` raised; nothing is begun after it.
    """
    waiting = deque(items)
    errors: list[Exception] = []

    def take(worker: TestWorker) -> None:
        while waiting and not errors and time.monotonic() < end:
            try:
                item = waiting.popleft()
            except IndexError:
                return  # another worker took the last
            try:
                work(worker, item)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return list(waiting)
