"""A small repository with a planted bug, and a runner without a sandbox, for tests alone."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sigma0.reason.sandbox.sandbox import RunResult

BUGGY = "def clamp(value, low, high):\n    return max(low, max(value, high))\n"
FIXED = "def clamp(value, low, high):\n    return max(low, min(value, high))\n"
HALF = "    if value > high:\n        return high\n"
OTHER = "def double(value):\n    return 2 * value\n"
TESTS = """from numbers_kit.ranges import clamp
from numbers_kit.scale import double


def test_a_value_inside_stays():
    assert clamp(3, 0, 5) == 3


def test_a_value_above_is_lowered():
    assert clamp(9, 0, 5) == 5


def test_double():
    assert double(4) == 8
"""
FILES = {
    "numbers_kit/__init__.py": "",
    "numbers_kit/ranges.py": BUGGY,
    "numbers_kit/scale.py": OTHER,
    "tests/test_numbers.py": TESTS,
    "README.md": "`clamp` keeps a value within bounds.",
}
FIX = {"action": "edit", "path": "numbers_kit/ranges.py", "old": "max(value, high)", "new": "min(value, high)"}
HALF_FIX = {"action": "edit", "path": "numbers_kit/ranges.py", "old": "    return max", "new": HALF + "    return max"}
BREAK = {"action": "edit", "path": "numbers_kit/scale.py", "old": "2 * value", "new": "value"}
RUN = {"action": "run_tests"}
FINISH = {"action": "finish"}
said = json.dumps


def planted(folder: Path) -> Path:
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files by path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.suffix != ".pyc"}


TOOLS = {
    "git": ["git", "apply", "--whitespace=nowarn", "-"],
    "patch": ["patch", "-p1", "--quiet", "--force", "--no-backup-if-mismatch"],
}


def applied(patch: str, folder: Path, tool: str) -> dict[str, bytes]:
    """All files of a folder that takes a patch."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing")
    # no repository above the folder may have a say in what git applies
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(TOOLS[tool], input=patch.encode(), cwd=folder, check=True, env=environment, capture_output=True)
    return contents(folder)


class PlainRunner:
    """Runs a command in a copy of a folder, without isolation: tests run only what they wrote themselves."""

    def run_command(self, command, folder, timeout_s=60.0, memory_mb=1024):
        if command[0] == "python":
            command = (sys.executable, *command[1:])
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            copy = Path(home) / "work"
            shutil.copytree(folder, copy)
            # the plugins of this environment take seconds to load
            environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            settings = {"cwd": copy, "env": environment, "timeout": timeout_s}
            done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
        return result(done.stdout, done.returncode, done.stderr, time.monotonic() - began)


def result(stdout="", exit_code=0, stderr="", seconds=0.1, timed_out=False):
    return RunResult(exit_code == 0 and not timed_out, stdout, stderr, exit_code, timed_out, 0, seconds)


class ReadingRunner:
    """Says what pytest would, from the two files that matter: quick."""

    def __init__(self):
        self.runs = 0

    def run_command(self, command, folder, timeout_s=60.0, memory_mb=1024):
        self.runs += 1
        ranges, scale = ((folder / "numbers_kit" / name).read_text() for name in ("ranges.py", "scale.py"))
        good = {
            "test_a_value_inside_stays": "min(value" in ranges,
            "test_a_value_above_is_lowered": "min(value" in ranges or "return high" in ranges,
            "test_double": "2 *" in scale,
        }
        return result(pytest_output(good), int(not all(good.values())))


def pytest_output(outcomes, where="tests/test_numbers.py"):
    """The end of pytest's output, by whether each test passed."""
    lines = [f"PASSED {where}::{name}" if good else f"FAILED {where}::{name} - no" for name, good in outcomes.items()]
    return "\n".join(["= FAILURES =", "numbers_kit/ranges.py:2: in clamp", "= short test summary info =", *lines, ""])
