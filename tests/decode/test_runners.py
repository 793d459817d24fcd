"""Which runner calls the step, and why; how many rows it expects, and what it counts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sigma0.config import KVConfig
from sigma0.decode import runners
from sigma0.decode.compiled import CudaCapture
from sigma0.decode.ops import TORCH, TRITON
from sigma0.decode.runner import LateRunner, RunnerChoice
from sigma0.decode.runners import RUNNERS, choose_runner
from sigma0.decode.settings import Program
from sigma0.decode.step import take_lines
from sigma0.decode.transfer import PassCounts
from tests.decode.captures import called_by
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
    result = choose_runner("auto", spread)
    assert (result.name, result.late) == ("eager", True) and "spread over several" in result.reason


def test_on_a_cpu(monkeypatch):
    model = tiny_model(0)
    assert choose_runner("auto", model) == RunnerChoice("eager", AUTO)
    assert choose_runner("eager", model, PYTHON, WAITS) == RunnerChoice("eager", ASKED)
    assert choose_runner("cudagraph", model).reason == "no CUDA graphs on cpu"
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    assert choose_runner("compile", model) == RunnerChoice("compile", ASKED)
    monkeypatch.setattr(runners, "compiler", lambda: None)
    assert "no C++ compiler" in choose_runner("compile", model).reason
    with pytest.raises(ValueError, match="no such runner: 'fast'; there are auto, eager, compile, cudagraph"):
        model.generate(torch.ones((1, 2), dtype=torch.int64), runner="fast")
    assert RUNNERS == ("auto", "eager", "compile", "cudagraph") and {"cuda": CudaCapture} == runners.CAPTURES


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "offload"])
def test_modules_with_hooks_are_called_by_python(hook, monkeypatch):
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    model = tiny_model(0)
    inner = model.model.layers[1].mlp
    if hook == "offload":
        inner._hf_hook = object()
    else:
        getattr(inner, f"register_{hook}_hook")(lambda *given: None)
    result = choose_runner("compile", model)
    assert (result.name, result.reason) == ("eager", "modules of the model have hooks, which only Python can call")


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


def chosen(model, ids=((5, 6, 7),), mask=None, **settings):
    mask = torch.ones(len(ids), len(ids[0]), dtype=torch.int64) if mask is None else torch.tensor(mask)
    settings = {"max_new_tokens": 3, "exit_config": {"q": 0.4}, "return_dict_in_generate": True} | settings
    return model.generate(torch.tensor(ids), attention_mask=mask, **settings).runner


@pytest.mark.parametrize("way", ["late", "captured", "compile"])
def test_what_a_cache_holds_may_need_another_runner(way, monkeypatch):
    monkeypatch.setattr(runners, "compiler", lambda: "g++")
    model, holes = tiny_model(0), {"ids": ((5, 0, 7),), "mask": ((1, 0, 1),)}
    with called_by(way, model) as (asked, _):
        unordered = chosen(model, **holes, **asked)
        assert (unordered.captured, unordered.late) == (False, False)
        assert ("pads do not all come first" in unordered.reason) == (unordered.name == "eager") == (way != "compile")
        model.generation_config.kv_config = KVConfig(codec="int8", group=8, segment=16)
        coded = chosen(model, **asked)
        assert coded == RunnerChoice("eager", "K/V in few bits are encoded between steps")


def test_what_has_to_be_seen_is_not_late():
    model = tiny_model(seed=1)
    with called_by("late", model):
        plain = chosen(model)
        assert plain.late and (plain.name, plain.reason) == ("eager", "what auto takes")
        assert chosen(model, runner="eager").late
        for asked in ({"logits_processor": [lambda ids, scores: scores]}, {"repetition_penalty": 1.3}):
            python = chosen(model, **asked)
            assert not python.late and "only Python knows" in python.reason
        statistics = chosen(model, output_statistics=True)
        assert not statistics.late and "statistics" in statistics.reason
    with called_by("captured", model):
        assert chosen(model, output_statistics=True).captured
        assert not chosen(model, output_statistics=True).late


@pytest.mark.parametrize(
    "program, heads",
    [
        (Program(), 5), (Program(verify=True), 5), (Program(reads_logits=True), 7),
        (Program(reads_logits=True, verify=True), 12),
    ],
)  # fmt: skip
def test_counts_of_a_step_are_in_its_last_line(program, heads):
    lines = np.zeros((3, 9), dtype=np.int64)
    lines[2, :5] = 11, 7, 5, 3, 2
    counts = PassCounts()
    output, counted = take_lines(lines, program, counts)
    assert len(output) == 2 and counted[:5].tolist() == [11, 7, 5, 3, 2]
    assert counts == PassCounts(passes=1, rows=11, head_rows=heads)
    lines[2, :5] = 0
    take_lines(lines, program, counts)
    assert (counts.passes, counts.rows) == (1, 11)


@pytest.mark.parametrize(
    "live, sequences, under_way, bound",
    [(0, 0, 0, 0), (0, 3, 1, 0), (1, 1, 0, 1), (1, 1, 1, 2), (3, 1, 0, 4), (3, 1, 1, 4), (3, 2, 1, 8), (8, 4, 0, 8),
     (8, 1, 1, 12), (9, 3, 1, 12)],
)  # fmt: skip
def test_rows_of_a_coming_step_are_bounded(live, sequences, under_way, bound):
    runner = object.__new__(LateRunner)
    runner.lanes = SimpleNamespace(count=12)
    runner._under_way = [None] * under_way
    runner.expect(live, sequences)
    assert runner._bound() == bound
