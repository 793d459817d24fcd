"""A process that has imported torch and pytest and forks a child for every run of tests; run as a file, not imported.

It imports nothing of sigma0, so that each child reads the sources of its own copy anew. Jobs are JSON lines on stdin,
answers JSON lines on stdout; the working folder is the copy of the tree. A child has a limit of CPU time, which a busy
machine does not shorten, and one of time on the clock, for what waits for ever.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

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

# A child's own exit code where it would import another tree than its copy.
OTHER_TREE = 70


class InOrder:
    """Runs test files in the order that they were asked for, whatever the tests' own conftest says."""

    def __init__(self, files):
        self._rank = {Path(file).resolve(): rank for rank, file in enumerate(files)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        result = yield
        items.sort(key=lambda item: self._rank.get(Path(item.path).resolve(), len(self._rank)))
        return result


class Covering:
    """Notes which test runs which line, and which fixtures it shares with others, whose lines are theirs too."""

    def __init__(self, sources):
        self._coverage = coverage.Coverage(data_file=None, include=sources, config_file=False, messages=False)
        self._coverage.start()
        self._context = [""]
        self.tests = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.tests[item.nodeid] = {"seconds": 0.0, "passed": True, "fixtures": list(item.fixturenames)}
        self._enter(item.nodeid)
        try:
            return (yield)
        finally:
            self._leave()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        self._enter(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._leave()

    def pytest_runtest_logreport(self, report):
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= report.passed

    def _enter(self, context):
        self._context.append(context)
        self._coverage.switch_context(context)

    def _leave(self):
        self._context.pop()
        self._coverage.switch_context(self._context[-1])

    def lines(self):
        """The contexts by number, and for every source and line the numbers of those that ran it."""
        self._coverage.stop()
        data = self._coverage.get_data()
        numbers = {context: number for number, context in enumerate(sorted(data.measured_contexts()))}
        lines = {
            file: {line: [numbers[each] for each in found] for line, found in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()
        }
        return {"contexts": list(numbers), "lines": lines}


def run(job):
    """The body of a child."""
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    limit = int(job["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    if not Path(importlib.util.find_spec("sigma0").origin).is_relative_to(os.getcwd()):
        return OTHER_TREE
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", *job["arguments"]]
    plugins = [InOrder(job["files"])]
    if job["cover"] is None:
        return int(pytest.main(arguments, plugins))
    covering = Covering(job["cover"]["sources"])
    code = int(pytest.main(arguments, [*plugins, covering]))
    Path(job["cover"]["out"]).write_text(json.dumps({"tests": covering.tests, **covering.lines()}))
    return code


def wait(child, seconds):
    """The exit code of a child, negative for a signal; None where its time on the clock ran out."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


def end_session(child):
    """Ends what is left of a child and of what it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def import_shared(roots):
    """Imports what modules of the tree import from elsewhere; which that is a child finds out, which may import the tree."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for name in roots:
            importlib.import_module(name)
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


def main():
    """Serves jobs until stdin ends; the arguments are modules of the tree that tests import."""
    import_shared(sys.argv[1:])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 3
            try:
                code = run(job)
            finally:
                os._exit(code)
        code = wait(child, job["wall_seconds"])
        end_session(child)
        if code is None:
            os.waitpid(child, 0)
        print(json.dumps({"code": code, "timed_out": code in (None, -signal.SIGXCPU)}), flush=True)


if __name__ == "__main__":
    main()
