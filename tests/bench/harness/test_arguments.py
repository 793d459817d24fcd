import sys
from dataclasses import replace

import pytest

from sigma0.bench.harness import __main__ as command
from sigma0.bench.harness.arguments import open_model
from sigma0.config import ExitConfig

CPU = {"device": "cpu", "dtype": "float32"}


def test_without_arguments_the_checkpoint_decides():
    opened = open_model("pocket", CPU)
    assert opened.exit_at() == opened.exit_config == opened.model.resolve_exit_config(None)


def test_a_named_mode_starts_afresh_and_single_fields_change_the_checkpoints_own():
    opened = open_model("pocket", {**CPU, "exit": "margin", "theta": 0.5})
    assert opened.exit_config == ExitConfig(mode="margin", theta=0.5)
    opened = open_model("pocket", {**CPU, "after_exit": "drop", "q": None})
    current = opened.model.resolve_exit_config(None)
    assert opened.exit_config == replace(current, after_exit="drop")


def test_effort_changes_the_setting_and_a_request_may_say_otherwise():
    opened = open_model("pocket", {**CPU, "exit": "qexit", "q": 0.6, "effort": "low"})
    assert opened.exit_at().q == pytest.approx(0.45)
    assert opened.exit_at("high").after_exit == "verify"


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ({"exits": "full"}, "takes no argument exits"),
        ({"effort": "max"}, "minimal, low, medium, high, got 'max'"),
        ({"exit": "full", "q": 0.5}, "q= has no effect with exit mode 'full'"),
        ({"q": 2.0}, "q: must lie in"),
        ({"exit": "fixed", "depth": 9}, "depth=9 exceeds the model's 6 loops"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, output):
    with pytest.raises(ValueError, match=output):
        open_model("pocket", {**CPU, **arguments})


def test_the_same_weights_are_loaded_once():
    first, second = open_model("pocket", {**CPU, "exit": "full"}), open_model("pocket", CPU)
    assert first.model is second.model and first.exit_config != second.exit_config


@pytest.mark.parametrize(
    "arguments, added",
    [
        (["--model", "sigma0", "--tasks", "x"], True),
        (["run", "--model=sigma0", "--model_args", "model=pocket,device=cpu"], True),
        (["-M", "sigma0"], True),
        (["--model", "sigma0", "--device", "cuda:1"], False),
        (["--model", "sigma0", "--device=cpu"], False),
        (["--model", "hf", "--tasks", "sigma0"], False),
        (["--config", "run.yaml", "--model", "sigma0"], False),
        (["ls", "tasks"], False),
        (["--model"], False),
    ],
)
def test_a_device_is_looked_for_where_none_is_named(arguments, added):
    assert command.with_device(arguments) == [*arguments, *(["--device", "auto"] if added else [])]


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"sigma0-lm\[eval\]"):
        command.main()
