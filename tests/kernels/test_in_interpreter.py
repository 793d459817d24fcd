"""Runs what lies in `interpreted/` in Triton's interpreter, in a process of its own: one that has it cannot compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import exhaustive

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "interpreted"
ONE = FOLDER / "test_attention_kernel.py::test_what_nobody_wrote_is_not_read"


@pytest.mark.cpu(20)
@pytest.mark.parametrize(
    "marked, tests",
    [("not slow", ONE), exhaustive("not slow and not exhaustive", FOLDER), exhaustive("slow or exhaustive", FOLDER)],
    ids=["one", "fast", "others"],
)
def test_the_interpreter_agrees(marked, tests):
    """In one process: a test of one kernel; of all files those that are fast; the others."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--cpu-limit", "0", "-m", marked]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    result = subprocess.run([*command, str(tests)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "passed" in result.stdout
