"""Runs what lies in `interpreted/` as compiled kernels on a GPU, and the benchmark that times them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "interpreted"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_gpu_agrees(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", str(FOLDER / file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment["SIGMA0_TEST_DEVICE"] = "cuda"
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "passed" in found.stdout and "skipped" not in found.stdout


def test_the_benchmark_tells_of_every_kernel_and_way():
    command = [sys.executable, "-m", "sigma0.bench", "kernels", "--device", "cuda", "--rows", "4", "--contexts", "512"]
    found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    report = json.loads(found.stdout)
    told = {(row["kernel"], row["way"]) for row in report["timings"]}
    assert len(told) == 24 and report["copy_gigabytes_per_second"] > 0
    assert all(row["microseconds"] > 0 and row["of_a_pass"] > 0 for row in report["timings"])
