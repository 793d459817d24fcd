import pytest

from sigma0.bench.harness.arguments import check_effort, open_model
from sigma0.config import ExitConfig

CPU = {"device": "cpu", "dtype": "float32"}


def test_without_arguments_the_checkpoint_decides():
    opened = open_model("pocket", CPU)
    assert opened.exit_at() == opened.own == opened.model.resolve_exit_config(None)


def test_a_named_mode_starts_afresh_and_single_fields_change_the_checkpoints_own():
    assert open_model("pocket", {**CPU, "exit": "margin", "theta": 0.5}).own == ExitConfig(mode="margin", theta=0.5)
    opened = open_model("pocket", {**CPU, "after_exit": "drop", "q": None})
    own = opened.model.resolve_exit_config(None)
    assert (opened.own.after_exit, opened.own.mode, opened.own.q) == ("drop", own.mode, own.q)


def test_effort_changes_the_setting_and_a_request_may_say_otherwise():
    opened = open_model("pocket", {**CPU, "exit": "qexit", "q": 0.6, "effort": "low"})
    assert opened.exit_at().q == pytest.approx(0.45)
    assert opened.exit_at("high").after_exit == "verify"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"exits": "full"}, "takes no argument exits"),
        ({"effort": "max"}, "minimal, low, medium, high, got 'max'"),
        ({"exit": "full", "q": 0.5}, "q= has no effect with exit mode 'full'"),
        ({"q": 2.0}, "q: must lie in"),
        ({"exit": "fixed", "depth": 9}, "depth=9 exceeds the model's 6 loops"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, told):
    with pytest.raises(ValueError, match=told):
        open_model("pocket", {**CPU, **arguments})


def test_an_effort_of_another_kind_of_model_is_refused():
    assert check_effort("minimal") == "minimal"
    with pytest.raises(ValueError, match="'xhigh'"):
        check_effort("xhigh")


def test_the_same_weights_are_loaded_once():
    first, second = open_model("pocket", {**CPU, "exit": "full"}), open_model("pocket", CPU)
    assert first.model is second.model and first.own != second.own
