"""The small repository passes its tests, fails them with each fault, and is what the agent's bench works on."""

import json
import shutil
import subprocess
import sys

import pytest

from sigma0.bench.outer.toy import FAULTS, write
from tests.bench.running import bench


def passes(folder):
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    return subprocess.run(line, cwd=folder, capture_output=True, timeout=120).returncode == 0


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: "none" if fault is None else fault.name)
def test_its_tests_pass_without_a_fault_and_fail_with_each(fault, tmp_path):
    write(tmp_path, fault)
    assert passes(tmp_path) == (fault is None)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_command_counts_what_was_mended(ledger):
    result = bench("agent", "pocket", "--steps", 4, "--max-tokens", 16, "--out", ledger)
    assert f"0 of {len(FAULTS)} faults mended" in result.output
    row = json.loads(ledger.read_text())
    assert (row["n"], row["right"]["value"], row["way"]) == (len(FAULTS), 0, "agent, held to actions, 4 steps")
