import os
import secrets

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray reads it once in a process, for all clusters that the process starts; without it Ray writes one to the home folder
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# gRPC, which Ray has loaded, else starts its threads anew in every child before it becomes another program
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import gc
import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sigma0
from tests.reference import tiny_model

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
VLLM = HERE / "serve" / "vllm"
# The files that take longest come first: where whole files are dealt out, the last one is else waited for alone.
LONGEST = (
    "serve/cluster/test_ray.py",
    "decode/test_compiled.py",
    "decode/test_conformance.py",
    "kernels/test_in_interpreter.py",
    "bench/gpu/test_gpu.py",
    "bench/harness/test_commands.py",
    "decode/test_parallel.py",
    "models/test_raven_parallel.py",
    "serve/page/test_page.py",
    "test_start.py",
)
STARTED = pytest.StashKey[tuple[float, int, dict[int, float]]]()
torch.set_num_threads(1)
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")
# in a fresh checkout it makes a table of all characters first, which takes a second
hypothesis.strategies.text().validate()


def pytest_addoption(parser):
    parser.addoption("--cpu-limit", type=float, default=3.0, help="CPU seconds that an unmarked test may take; 0: any")


def pytest_ignore_collect(collection_path, config):
    """Asked for vLLM's tests alone, nothing else is imported: their environment has not what other tests need."""
    apart = not (VLLM.is_relative_to(collection_path) or collection_path.is_relative_to(VLLM))
    return True if config.option.markexpr == "vllm" and apart else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Divides the cases of a grid, in their order; the files that take longest come first."""
    counted = Counter()
    for item in items:
        grid = item.get_closest_marker("grid")
        if grid and not item.get_closest_marker("exhaustive"):
            name, fast, slow = (item.parent, item.originalname), grid.kwargs["fast"], grid.kwargs["slow"]
            if not item.get_closest_marker("slow") and counted[name, "fast"] < fast:
                counted[name, "fast"] += 1
                continue
            counted[name, "slow"] += 1
            item.add_marker("slow" if counted[name, "slow"] <= slow else "exhaustive")
    order = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish():
    """Leaves the million objects of imports out of later collections, each of which some one test would pay for."""
    gc.freeze()


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended: a busy machine does not change it, as it does the clock."""
    return sum(os.times()[:4])


def _children() -> dict[int, float]:
    """CPU seconds of the children that there are: those of earlier tests count as ended when a later one looks."""
    children = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            children[child.pid] = sum(child.cpu_times()[:4])
    return children


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = _cpu_seconds(), len(sys.modules), _children()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Fails an unmarked test that takes long, with its fixtures and children: a slow suite is not run."""
    yield
    began, imported, earlier = item.stash[STARTED]
    took = _cpu_seconds() - began - sum(earlier[pid] for pid in earlier.keys() - _children().keys())
    item.user_properties.append(("cpu_seconds", round(took, 2)))
    current = item.get_closest_marker("cpu")
    limit = item.config.option.cpu_limit
    allowed = current.args[0] if current and limit else limit
    # whichever comes first imports what others need too
    imports = 0.003 * (len(sys.modules) - imported)
    if 0 < allowed < took - imports and not any(map(item.get_closest_marker, ("slow", "exhaustive", "gpu", "vllm"))):
        said = f"took {took:.2f} s of CPU, {imports:.2f} of them for imports; {allowed:g} s may be taken, all included"
        pytest.fail(f"{said}: make it smaller or mark it slow (tests/README.md)", pytrace=False)


class Golden:
    """A published-code checkpoint written out as an ordinary folder, with its reference outputs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.tensors = load_file(GOLDEN / f"{name}.safetensors")
        config = {"model_type": "ouro", "architectures": ["OuroForCausalLM"]}
        config |= json.loads((GOLDEN / f"{name}.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
        weights = {key.removeprefix("weights."): value for key, value in self.tensors.items() if "weights." in key}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.model = self.load(folder)

    def load(self, folder: Path):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]


@pytest.fixture(scope="session", params=["ouro-mha", "ouro-gqa"])
def golden(request, tmp_path_factory):
    return Golden(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def pocket():
    """The shipped model and its tokenizer."""
    return sigma0.load("pocket", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def tiny():
    """A small random model of three loops and two layers."""
    return tiny_model(seed=0)
