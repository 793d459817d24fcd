"""Which fast tests run which lines, kept in files: a test file is covered anew as it or a source it runs changes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sigma0.bench.mutation.workers import TestWorker

# A test file under coverage, at most: on the CPU and on the clock, seconds.
_CPU, _WALL = 900.0, 1800.0


@dataclass(frozen=True)
class Test:
    """A test that passes on the tree as it is.

    Attributes:
        name: pytest's id.
        file: Its file, relative to the tree.
        seconds: What it took, its own fixtures included.
    """

    __test__ = False

    name: str
    file: str
    seconds: float


class Covered:
    """What tests run.

    Args:
        files: By test file, what `forks.Covering` noted, with digests of it and of the sources it ran.
    """

    def __init__(self, files: dict[str, Any]) -> None:
        self.failed: list[str] = []
        self._by_line: dict[tuple[str, int], set[Test]] = {}
        self._by_import: dict[str, set[Test]] = {}
        for file, noted in files.items():
            self._add(file, noted)

    def _add(self, file: str, noted: dict[str, Any]) -> None:
        tests = {}
        sharing: dict[str, list[Test]] = {}
        for name, seen in noted["tests"].items():
            if not seen["passed"]:
                self.failed.append(name)
                continue
            tests[name] = Test(name, file, seen["seconds"])
            for fixture in seen["fixtures"]:
                sharing.setdefault(f"fixture {fixture}", []).append(tests[name])
        for source, lines in noted["lines"].items():
            if lines:
                self._by_import.setdefault(source, set()).update(tests.values())
            for line, contexts in lines.items():
                found = self._by_line.setdefault((source, int(line)), set())
                for context in (noted["contexts"][number] for number in contexts):
                    found.update(sharing.get(context, [tests[context]] if context in tests else []))

    def of_lines(self, source: str, lines: range) -> set[Test]:
        """Tests that run any of the lines."""
        return set().union(*(self._by_line.get((source, line), ()) for line in lines))

    def of_module(self, source: str) -> set[Test]:
        """Tests in files that import it."""
        return self._by_import.get(source, set())


def digest(path: Path) -> str:
    """Of a file; of one that is not there, of nothing."""
    return sha256(path.read_bytes() if path.exists() else b"").hexdigest()[:16]


class CoverageCache:
    """What is known of test files, a JSON file for each.

    Args:
        folder: Where they are.
        root: The tree that test files and sources stand in.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root

    def stale(self, test_files: Sequence[str]) -> list[str]:
        """Test files of which nothing is known, or something else than holds now."""
        return [file for file in test_files if not self._holds(self._read(file))]

    def covered(self, test_files: Sequence[str]) -> Covered:
        """What the test files run, of those that are known."""
        known = {file: self._read(file) for file in test_files}
        return Covered({file: noted for file, noted in known.items() if noted is not None})

    def cover(self, worker: TestWorker, file: str, sources: Sequence[str], seconds: float = _WALL) -> None:
        """Runs a test file in a worker's copy, and keeps which of its tests run which lines.

        Args:
            worker: Whose copy it is run in.
            file: The test file.
            sources: The sources whose lines count, relative to the tree.
            seconds: On the clock, at most; nothing is kept of a file that takes longer.

        Raises:
            ValueError: If it cannot be run.
        """
        out = worker.copy.with_name(f"{worker.copy.name}.cover.json")
        out.unlink(missing_ok=True)
        patterns = [str(worker.copy / source) for source in sources]
        ended = worker.run([file], _CPU, min(seconds, _WALL), cover={"sources": patterns, "out": str(out)})
        if ended.timed_out:
            return
        if not out.exists():
            raise ValueError(f"{file!r} cannot be run (exit code {ended.code}): {worker.log[-500:]}")
        noted: dict[str, Any] = json.loads(out.read_text())
        noted["lines"] = {str(Path(name).relative_to(worker.copy)): seen for name, seen in noted["lines"].items()}
        noted["digests"] = {name: digest(worker.copy / name) for name in (file, *noted["lines"])}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._place(file).write_text(json.dumps(noted))

    def _place(self, file: str) -> Path:
        return self._folder / f"{file.removesuffix('.py').replace('/', '.')}.json"

    def _read(self, file: str) -> dict[str, Any] | None:
        place = self._place(file)
        return json.loads(place.read_text()) if place.exists() else None

    def _holds(self, noted: dict[str, Any] | None) -> bool:
        return noted is not None and all(digest(self._root / name) == known for name, known in noted["digests"].items())
