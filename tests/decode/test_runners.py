"""Which runner calls the step, and why."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sigma0.decode import runners
from sigma0.decode.attention import CodedPlacement, Placement
from sigma0.decode.lanes import Lanes
from sigma0.decode.ops import TORCH, TRITON
from sigma0.decode.runner import EagerRunner, RunnerChoice
from sigma0.decode.runners import choose_runner, open_runner
from sigma0.decode.settings import SequenceSettings
from tests.reference import tiny_model

CUDA = SimpleNamespace(device=torch.device("cuda"), operations=TRITON)
PYTHON, WAITS = "a processor", "a grammar"
AUTO, ASKED = "what auto takes", "asked for"


@pytest.mark.parametrize(
    "wanted, python, waits, expected",
    [
        ("auto", None, None, RunnerChoice("cudagraph", AUTO, True, True)),
        ("cudagraph", None, None, RunnerChoice("cudagraph", ASKED, True, True)),
        ("compile", None, None, RunnerChoice("compile", ASKED, True, True)),
        ("auto", None, WAITS, RunnerChoice("cudagraph", AUTO, False, True)),
        ("auto", PYTHON, None, RunnerChoice("eager", PYTHON)),
        ("compile", PYTHON, WAITS, RunnerChoice("eager", PYTHON)),
        ("eager", None, None, RunnerChoice("eager", ASKED, True)),
        ("eager", None, WAITS, RunnerChoice("eager", f"{ASKED}; {WAITS}")),
        ("eager", PYTHON, WAITS, RunnerChoice("eager", f"{ASKED}; {PYTHON}")),
    ],
)
def test_on_a_device_that_would_be_waited_for(wanted, python, waits, expected):
    assert choose_runner(wanted, CUDA, python, waits) == expected


def test_what_keeps_a_step_from_being_one_launch():
    looks = SimpleNamespace(device=torch.device("cuda"), operations=TORCH)
    reason = "attention in plain torch reads positions on the host"
    assert choose_runner("auto", looks) == RunnerChoice("eager", reason)
    assert choose_runner("eager", looks).reason == f"{ASKED}; {reason}"
    spread = SimpleNamespace(device=torch.device("cuda"), operations=replace(TRITON, broadcast=lambda part: part))
    found = choose_runner("auto", spread)
    assert (found.name, found.late) == ("eager", True) and "spread over several" in found.reason


def test_on_a_cpu(monkeypatch):
    model = tiny_model(0)
    assert choose_runner("auto", model) == RunnerChoice("eager", AUTO)
    assert choose_runner("eager", model, PYTHON, WAITS) == RunnerChoice("eager", ASKED)
    assert choose_runner("cudagraph", model).reason == "no CUDA graphs on cpu"
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    assert choose_runner("compile", model) == RunnerChoice("compile", ASKED)
    monkeypatch.setattr(runners, "compiler", lambda: None)
    assert "no C++ compiler" in choose_runner("compile", model).reason
    with pytest.raises(ValueError, match="no such runner: 'fast'"):
        choose_runner("fast", model)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "offload"])
def test_modules_with_hooks_are_called_by_python(hook, monkeypatch):
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    model = tiny_model(0)
    inner = model.model.layers[1].mlp
    if hook == "offload":
        inner._hf_hook = object()
    else:
        getattr(inner, f"register_{hook}_hook")(lambda *given: None)
    found = choose_runner("compile", model)
    assert (found.name, found.reason) == ("eager", "modules of the model have hooks, which only Python can call")


def test_compiled_steps_are_for_cpus(monkeypatch):
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    other = SimpleNamespace(device=torch.device("meta"), operations=TORCH)
    assert choose_runner("compile", other).reason == "compile is for models on a CPU or on CUDA, this one is on meta"
    assert choose_runner("cudagraph", other).reason == "no CUDA graphs on meta"
    assert choose_runner("auto", other) == RunnerChoice("eager", AUTO)


def test_a_model_on_several_devices_is_called_by_python():
    model = tiny_model(0)
    model.lm_head.to("meta")
    assert choose_runner("compile", model).reason == (
        "a step in one piece is for models on one device, this one is spread over several"
    )


SEEN = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    "place, choice, expected",
    [
        ({}, RunnerChoice("eager", "why"), RunnerChoice("eager", "why")),
        ({"coded": CodedPlacement(4)}, RunnerChoice("eager", "why"), RunnerChoice("eager", "why")),
        ({"coded": CodedPlacement(4)}, RunnerChoice("eager", "why", late=True),
         RunnerChoice("eager", "K/V in few bits are encoded between steps")),
        ({"coded": CodedPlacement(4)}, RunnerChoice("compile", "why"),
         RunnerChoice("eager", "K/V in few bits are encoded between steps")),
        ({"seen": SEEN}, RunnerChoice("eager", "why"), RunnerChoice("eager", "why")),
        ({"seen": SEEN}, RunnerChoice("compile", "why"),
         RunnerChoice("eager", "compile is for prompts whose pads all come first")),
        ({"seen": SEEN}, RunnerChoice("compile", "why", captured=True),
         RunnerChoice("eager", "why; pads do not all come first")),
        ({"seen": SEEN}, RunnerChoice("eager", "why", late=True),
         RunnerChoice("eager", "why; pads do not all come first")),
    ],
)  # fmt: skip
def test_what_a_cache_holds_may_need_another_runner(place, choice, expected):
    model = tiny_model(0)
    model.backend = "torch"
    storage = SimpleNamespace(placement=lambda longest: Placement(4, 5, **place))
    lanes, settings = Lanes(1, 3, torch.zeros(0, 32)), SequenceSettings(1, 3, torch.device("cpu"))
    runner = open_runner(choice, model, lanes, settings, storage, SimpleNamespace())
    assert type(runner) is EagerRunner and runner.chosen == expected
    assert runner.holds == ("coded" in place)
