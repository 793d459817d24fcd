"""Runs what lies in `interpreted/` in Triton's interpreter, in a process of its own: one that has it cannot compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import exhaustive

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("marked", ["not slow", exhaustive("slow")])
def test_the_interpreter_agrees(marked):
    """All files in one process; those of its tests that are fast, or the others."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "passed" in found.stdout
