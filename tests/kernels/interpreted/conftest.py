"""These run the kernels: with TRITON_INTERPRET=1 on a CPU, where there is a CUDA device on that, elsewhere not at all.

`tests/kernels/test_in_interpreter.py` starts them in an interpreter. On a GPU those that are fast have the mark `gpu`.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = os.environ.get("SIGMA0_TEST_DEVICE", "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

if not INTERPRETED and DEVICE == "cpu":
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if DEVICE == "cpu":
        return
    for item in items:
        current = item.path.is_relative_to(Path(__file__).parent)
        if current and not any(map(item.get_closest_marker, ("slow", "exhaustive"))):
            item.add_marker("gpu")


@pytest.fixture
def on_device(monkeypatch):
    """Makes every tensor of a test on the device under test, and poisons memory that nobody wrote."""
    assert INTERPRETED or DEVICE != "cpu", "kernels run with TRITON_INTERPRET=1 or on a GPU"
    torch.set_default_device(DEVICE)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(_poisoned, getattr(torch, name)))
    yield
    torch.set_default_device(None)


def _poisoned(make, *args, **kwargs):
    tensor = make(*args, **kwargs)
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(1)
