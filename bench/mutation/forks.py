"""A process that has imported torch and pytest and forks a child for every run of tests; run as a file, not imported.

It imports nothing of sigma0, so that each child reads the sources of its own copy anew. Jobs are JSON lines on stdin,
answers JSON lines on stdout; the working folder is the copy of the tree. A child has a limit of CPU time, which a busy
machine does not shorten, and one of time on the clock, for what waits for ever.
"""

# ruff: noqa: E402  (the libraries read the environment as they are imported)

import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# those of tests/conftest.py, which are read as libraries are imported; a stale .pyc must not stand for a mutant
os.environ |= {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": os.getcwd(),
}
sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())

import coverage
import pytest

# A child's own exit codes: it would import another tree than its copy; it could not run pytest.
OTHER_TREE, BROKEN = 70, 71


class InOrder:
    """Runs test files in the order that they were asked for, whatever the tests' own conftest says."""

    def __init__(self, files: Sequence[str]) -> None:
        self._rank = {Path(file).resolve(): rank for rank, file in enumerate(files)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Sorts after everybody else has."""
        result = yield
        items.sort(key=lambda item: self._rank.get(Path(item.path).resolve(), len(self._rank)))
        return result


class Covering:
    """Notes which test runs which line, and which fixtures it shares with others, whose lines are theirs too."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._coverage = coverage.Coverage(data_file=None, include=sources, config_file=False, messages=False)
        self._coverage.start()
        self._context = [""]
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test, with the fixtures that are made for it alone."""
        self.tests[item.nodeid] = {"seconds": 0.0, "passed": True, "fixtures": list(getattr(item, "fixturenames", ()))}
        self._enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._leave()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """A fixture that tests share."""
        if fixturedef.scope == "function":
            return (yield)
        self._enter(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._leave()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long a test took, and whether it passed."""
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= report.passed

    def _enter(self, context: str) -> None:
        self._context.append(context)
        self._coverage.switch_context(context)

    def _leave(self) -> None:
        self._context.pop()
        self._coverage.switch_context(self._context[-1])

    def lines(self) -> dict[str, Any]:
        """The contexts by number, and for every source and line the numbers of those that ran it."""
        self._coverage.stop()
        data = self._coverage.get_data()
        numbers = {context: number for number, context in enumerate(sorted(data.measured_contexts()))}
        lines = {
            file: {line: [numbers[each] for each in found] for line, found in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()
        }
        return {"contexts": list(numbers), "lines": lines}


def run(job: dict[str, Any]) -> int:
    """The body of a child."""
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    limit = int(job["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    spec = importlib.util.find_spec("sigma0")
    if spec is None or not Path(spec.origin or "").is_relative_to(os.getcwd()):
        return OTHER_TREE
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", *job["arguments"]]
    plugins: list[object] = [InOrder(job["files"])]
    if job["cover"] is None:
        return int(pytest.main(arguments, plugins))
    covering = Covering(job["cover"]["sources"])
    code = int(pytest.main(arguments, [*plugins, covering]))
    Path(job["cover"]["out"]).write_text(json.dumps({"tests": covering.tests, **covering.lines()}))
    return code


def wait(child: int, seconds: float) -> int | None:
    """The exit code of a child, negative for a signal; None where its time on the clock ran out."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def end_session(child: int) -> None:
    """Ends what is left of a child and of what it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def import_shared(roots: Sequence[str]) -> None:
    """Imports what pytest's plugins are, and what modules of the tree import from elsewhere.

    A child finds out what that is, which may import the tree.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for name in roots:
            importlib.import_module(name)
        for plugin in entry_points(group="pytest11"):
            plugin.load()
        own = {name.split(".")[0] for name in roots} | {"sigma0"}
        names = [name for name in sys.modules if name.split(".")[0] not in own]
        with os.fdopen(writing, "w") as out:
            json.dump(names, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        names = json.load(found)
    os.waitpid(child, 0)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # made while its package was imported, and not by this name


def answer(values: dict[str, Any]) -> None:
    """Writes a line to whoever sent the job."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves jobs until stdin ends; the arguments are modules of the tree that tests import."""
    import_shared(sys.argv[1:])
    answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = BROKEN
            try:
                code = run(job)
            finally:
                os._exit(code)
        ended = wait(child, job["wall_seconds"])
        end_session(child)
        if ended is None:
            os.waitpid(child, 0)
        answer({"code": ended, "timed_out": ended in (None, -signal.SIGXCPU)})


if __name__ == "__main__":
    main()
