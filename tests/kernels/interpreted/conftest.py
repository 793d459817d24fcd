"""These run the kernels: with TRITON_INTERPRET=1 on a CPU, with SIGMA0_TEST_DEVICE=cuda on a GPU, elsewhere not at all.

`tests/kernels/test_in_interpreter.py` and `test_on_gpu.py` start them so.
"""

import os
from functools import partial

import pytest
import torch

DEVICE = os.environ.get("SIGMA0_TEST_DEVICE", "cpu")

if os.environ.get("TRITON_INTERPRET") != "1" and DEVICE == "cpu":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def on_device(monkeypatch):
    """Makes every tensor of a test on the device under test, and poisons memory that nobody wrote."""
    torch.set_default_device(DEVICE)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(_poisoned, getattr(torch, name)))
    yield
    torch.set_default_device(None)


def _poisoned(make, *args, **kwargs):
    tensor = make(*args, **kwargs)
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(1)
