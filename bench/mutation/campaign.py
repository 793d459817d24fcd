"""A sample of mutants under the tests that run them: killed, survived, or not reached."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sigma0.bench.core.rows_tests import MutationScore
from sigma0.bench.mutation.covering import CoverageCache, Covered, Test
from sigma0.bench.mutation.mutants import Mutant
from sigma0.bench.mutation.workers import NO_TESTS, NOT_FOUND, PASSED, TestWorker, spread

Outcome = Literal["killed", "timed out", "survived", "not reached"]
# A mutant's tests may take this many times what they took before, on the CPU, beside what it takes to start them.
_TIMES = 4
# On the clock, over the CPU's seconds: other work on the machine, and what waits for a process or a socket.
_WAITING = 4


@dataclass(frozen=True)
class Area:
    """A folder of sources and the fast tests beside it.

    Attributes:
        sources: Relative to the tree.
        tests: Folders of its tests.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """What became of a mutant.

    Attributes:
        folder: The area it is of.
        mutant: Itself.
        outcome: What became of it.
        tests: How many tests it was run against.
        seconds: On the clock.
        by: The first test that failed; None where none did.
    """

    folder: str
    mutant: Mutant
    outcome: Outcome
    tests: int
    seconds: float
    by: str | None


def test_files(root: Path, areas: Mapping[str, Area]) -> list[str]:
    """The test files of the areas."""
    folders = dict.fromkeys(folder for area in areas.values() for folder in area.tests)
    return [str(path.relative_to(root)) for each in folders for path in sorted((root / each).rglob("test_*.py"))]


def nearest(mutant: Mutant, area: Area, covered: Covered, most_seconds: float) -> list[Test]:
    """The tests that run a mutant's line, the nearest files first and the quickest of these.

    A line in the head of a function is run by those that run its body; one at the top of a module or a class by those
    that run anything of the module; first, in both cases, the test file of the same name.

    Args:
        mutant: The mutant.
        area: Where it is.
        covered: Which test runs which line.
        most_seconds: After that much of them no more are taken, as they were timed before.
    """
    scope = mutant.scope
    lines = scope.statement if not scope.head else scope.function
    found = covered.of_module(mutant.file) if lines is None else covered.of_lines(mutant.file, lines)
    in_file: dict[str, list[Test]] = defaultdict(list)
    for test in sorted(found, key=lambda test: (test.seconds, test.name)):
        in_file[test.file].append(test)
    name = f"test_{Path(mutant.file).name}"

    def rank(file: str) -> tuple[bool, bool, float, str]:
        seconds = sum(test.seconds for test in in_file[file])
        return Path(file).name != name, not file.startswith(area.tests), seconds, file

    chosen: list[Test] = []
    spent = 0.0
    for test in (test for file in sorted(in_file, key=rank) for test in in_file[file]):
        if spent + test.seconds <= most_seconds or not chosen:
            spent += test.seconds
            chosen.append(test)
    return chosen


class Campaign:
    """Mutants judged in copies of a tree.

    Args:
        workers: Their copies.
        root: The tree, which nobody changes meanwhile.
        areas: By name.
        cache: What tests are known to run.
        most_seconds: Of tests, for a mutant.
        end: When the run is over, on `time.monotonic`'s clock.
        covered_by: When no more tests are run for what they cover, on the same clock.
        start: What starting tests may take, seconds of the CPU.
    """

    def __init__(
        self,
        workers: Sequence[TestWorker],
        root: Path,
        areas: Mapping[str, Area],
        cache: CoverageCache,
        most_seconds: float,
        end: float,
        covered_by: float,
        start: float = 30.0,
    ) -> None:
        self._workers, self._root, self._areas, self._cache = workers, root, areas, cache
        self._most_seconds, self._end, self._start = most_seconds, end, start
        self._covered_by = covered_by

    @property
    def stale(self) -> list[str]:
        """Test files of which it is not known what they run."""
        return self._cache.stale(test_files(self._root, self._areas))

    def cover(self, files: Sequence[str], advance: Callable[[int], None]) -> list[str]:
        """Finds out what test files run; gives those that the time did not suffice for."""
        sources = [source if source.endswith(".py") else f"{source}/*" for source in self._sources]

        def work(worker: TestWorker, file: str) -> None:
            self._cache.cover(worker, file, sources, max(self._covered_by - time.monotonic(), 1.0))
            done.append(file)
            advance(len(done))

        done: list[str] = []
        spread(self._workers, files, work, self._covered_by)
        return self._cache.stale(files)

    def judge(self, drawn: Mapping[str, Sequence[Mutant]], advance: Callable[[int], None]) -> list[Judged]:
        """What becomes of mutants, by area; those of all areas in turn, so that each has its share of the time."""
        files = test_files(self._root, self._areas)
        covered, unknown = self._cache.covered(files), self._cache.stale(files)
        queues = {folder: list(mutants) for folder, mutants in drawn.items()}
        turns = range(max(map(len, queues.values()), default=0))
        items = [(folder, queue[turn]) for turn in turns for folder, queue in queues.items() if turn < len(queue)]
        judged: list[Judged] = []

        def work(worker: TestWorker, item: tuple[str, Mutant]) -> None:
            folder, mutant = item
            tests = nearest(mutant, self._areas[folder], covered, self._most_seconds)
            begun = time.monotonic()
            outcome, by = self._outcome(worker, mutant, tests)
            if not tests and unknown:
                outcome = "not reached"  # a file that is not known may have one
            judged.append(Judged(folder, mutant, outcome, len(tests), time.monotonic() - begun, by))
            advance(len(judged))

        left = spread(self._workers, items, work, self._end)
        return judged + [Judged(folder, mutant, "not reached", 0, 0.0, None) for folder, mutant in left]

    @property
    def _sources(self) -> list[str]:
        return [source for area in self._areas.values() for source in area.sources]

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _outcome(self, worker: TestWorker, mutant: Mutant, tests: Sequence[Test]) -> tuple[Outcome, str | None]:
        if not tests:
            return "survived", None
        with worker.changed(mutant.file, mutant.text):
            code, timed_out, cut = self._run(worker, tests, [test.name for test in tests])
            if code == NOT_FOUND and not cut:
                # what a test is named after may be what was changed
                files = list(dict.fromkeys(test.file for test in tests))
                code, timed_out, cut = self._run(worker, tests, files)
        if cut:
            return "not reached", None
        if timed_out:
            return "timed out", None
        if code == NO_TESTS:
            raise ValueError(f"no test was left of {[test.name for test in tests][:3]}: {worker.log[-300:]}")
        return ("survived", None) if code == PASSED else ("killed", _first_failed(worker.log))

    def _run(self, worker: TestWorker, tests: Sequence[Test], names: Sequence[str]) -> tuple[int | None, bool, bool]:
        """Exit code, whether the tests' time ran out, and whether the run's did."""
        cpu = self._start + _TIMES * sum(test.seconds for test in tests)
        left = max(self._left(), 1.0)
        files = list(dict.fromkeys(test.file for test in tests))
        ended = worker.run(["-x", *names], cpu, min(_WAITING * cpu, left), files)
        return ended.code, ended.timed_out, ended.code is None and left < _WAITING * cpu


def _first_failed(log: str) -> str | None:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)
    return found[1] if found else None


def scores(judged: Sequence[Judged], reason: Callable[[Mutant], str | None]) -> dict[str, MutationScore]:
    """Counts by area.

    Args:
        judged: What became of mutants.
        reason: Why a mutant cannot be killed; None where none is known.
    """
    found: dict[str, MutationScore] = {}
    for each in judged:
        equivalent = each.outcome == "survived" and reason(each.mutant) is not None
        one = MutationScore(
            killed=each.outcome in ("killed", "timed out"),
            by_time=each.outcome == "timed out",
            survived=each.outcome == "survived" and not equivalent,
            equivalent=equivalent,
            not_reached=each.outcome == "not reached",
        )
        found[each.folder] = found.get(each.folder, MutationScore()) + one
    return found
