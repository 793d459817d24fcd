"""What only a GPU can show, beside `interpreted/`, which runs there as compiled kernels in this process too."""

import json

import pytest
import torch
from typer.testing import CliRunner

from sigma0.bench.commands import app
from sigma0.bench.gpu.equality import TOGETHER, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_states_bits_depend_neither_on_the_rule_nor_on_company():
    result = compare("cuda", ("tiny",))
    assert result and [row for row in result if not row["equal"] and row["pair"] != TOGETHER] == []


def test_the_benchmark_tells_of_every_kernel_and_way():
    command = ["kernels", "--device", "cuda", "--rows", "4", "--contexts", "512", "--ways", "kernel,eager", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    reported = {(row["kernel"], row["way"]) for row in report["timings"]}
    assert len(reported) == 16 and report["copy_gigabytes_per_second"] > 0
    assert all(row["microseconds"] > 0 and row["of_a_pass"] > 0 for row in report["timings"])
