from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sigma0 import ExitConfig
from sigma0.config import FateConfig, exit_for


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"q": 0.0}, r"q: must lie in \(0, 1\], got 0.0"),
        ({"q": 1.01}, "got 1.01"),
        ({"q": float("nan")}, "got nan"),
        ({"mode": "margin", "theta": -1}, r"theta: must lie in \(0, 1\], got -1.0"),
        ({"mode": "converge", "eps": 0}, "eps: must be a finite number above 0, got 0.0"),
        ({"mode": "accel", "eps": float("inf")}, "got inf"),
        ({"mode": "accel", "patience": 0}, "patience: must be at least 1, got 0"),
        ({"min_loops": 0}, "min_loops: must be at least 1, got 0"),
        ({"mode": "fixed"}, "needs depth=k"),
        ({"mode": "fixed", "depth": 0}, "depth: must be at least 1, got 0"),
        ({"depth": 3}, "depth=3 has no meaning for mode 'qexit'"),
        ({"mode": "never"}, "mode: Input should be 'full'.* got 'never'$"),
        ({"q": "much"}, "q: .* got 'much'$"),
        ({"q": "much" * 20}, "q: .*number$"),
        ({"after_exit": "later"}, "after_exit: Input should be"),
        ({"threshold": 0.5}, "threshold: Unexpected keyword argument; there are mode"),
        ({"mode": "margin", "tetha": 0.5}, "tetha: Unexpected keyword argument; there are mode, q, eps, patience"),
        ({"mode": "margin", "q": 0.5}, "q has no effect with exit mode 'margin', only with qexit"),
        ({"theta": 0.9}, "theta has no effect with exit mode 'qexit', only with margin"),
        ({"mode": "converge", "patience": 3}, "patience has no effect with exit mode 'converge', only with accel"),
        (
            {"mode": "margin", "accel_scale": "steps"},
            "accel_scale has no effect with exit mode 'margin', only with accel",
        ),
        ({"mode": "full", "eps": 0.1}, "eps has no effect with exit mode 'full', only with converge or accel"),
        ({"mode": "kl", "delta": 0.0}, "finite number above 0"),
        ({"mode": "kl", "theta": 0.5}, "theta has no effect with exit mode 'kl'"),
        ({"mode": "margin", "delta": 0.5}, "delta has no effect with exit mode 'margin', only with entropy-diff or"),
        ({"mode": "argmax-stability", "delta": 0.5}, "delta has no effect"),
        ({"mode": "argmax-stability", "stable": 0}, "must be at least 1"),
        ({"mode": "kl", "delta": True}, "delta: must be a number, got True$"),
        ({"mode": "kl", "delta": "0.1"}, "delta: must be a number, got '0.1'"),
        ({"mode": "argmax-stability", "stable": "3"}, "stable: must be a whole number, got '3'$"),
        ({"mode": "argmax-stability", "stable": 1.5}, "stable: must be a whole number, got 1.5$"),
        ({"mode": "fixed", "depth": True}, "depth: must be a whole number, got True"),
    ],
)
def test_bad_values_are_named(wrong, message):
    for construct in (ExitConfig.parse, lambda fields: ExitConfig(**fields)):
        with pytest.raises(ValueError, match=message) as caught:
            construct(wrong)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("exit_config: ")
    with pytest.raises(ValueError, match=message if "no effect" in message else None):
        TypeAdapter(ExitConfig).validate_python(wrong)


def test_an_unknown_field_of_another_setting_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^fate_config: grow: Unexpected keyword argument; there are growth, spiral$"):
        FateConfig(grow=1.0)


def test_copied_settings_keep_what_another_mode_would_read():
    config = replace(ExitConfig(q=0.7), mode="margin")
    assert (config.mode, config.q) == ("margin", 0.7)
    assert ExitConfig.parse(config.to_dict()) == config
    with pytest.raises(ValueError, match="q has no effect with exit mode 'margin', only with qexit"):
        config.check_read()
    ExitConfig(mode="accel", eps=0.1, patience=1, accel_scale="steps").check_read()


@given(
    st.builds(
        partial(replace, ExitConfig()),
        mode=st.sampled_from(["full", "qexit", "converge", "accel", "margin"]),
        q=st.floats(0.01, 1.0),
        eps=st.floats(1e-4, 10),
        theta=st.floats(0.01, 1.0),
        patience=st.integers(1, 5),
        min_loops=st.integers(1, 9),
        after_exit=st.sampled_from(["finish", "drop"]),
    )
)
def test_dict_round_trip(config):
    assert ExitConfig.parse(config.to_dict()) == config


def test_efforts_are_ordered_for_every_rule():
    for current, name in (
        (ExitConfig(q=0.8), "q"),
        (ExitConfig(mode="margin", theta=0.8), "theta"),
        (ExitConfig(mode="fixed", depth=4), "depth"),
    ):
        result = [getattr(exit_for(effort, current, 6), name) for effort in ("minimal", "low", "medium")]
        assert result == sorted(result) and len(set(result)) == 3
    eager = [exit_for(effort, ExitConfig(mode="accel", eps=0.05), 6).eps for effort in ("minimal", "low", "medium")]
    assert eager == sorted(eager, reverse=True)
    assert exit_for("minimal", ExitConfig(mode="kl", delta=0.1), 4).delta == 0.2
    assert exit_for("minimal", ExitConfig(mode="argmax-stability", stable=2), 4).stable == 2
    full = ExitConfig(mode="full")
    assert [exit_for(effort, full, 6).stops_at(6) for effort in ("minimal", "low", "medium", "high")] == [3, 5, 6, 6]
    assert exit_for("high", ExitConfig(mode="fixed", depth=2), 6) == full
    assert exit_for("minimal", ExitConfig(mode="fixed", depth=1), 6).depth == 1


@pytest.mark.parametrize(
    "current", [ExitConfig(q=0.5), ExitConfig(mode="margin", theta=0.5, after_exit="drop"), ExitConfig(mode="accel")]
)
def test_high_is_checked_by_full_depth_and_keeps_its_rule(current):
    high = exit_for("high", current, 5)
    assert (high.mode, high.after_exit, high.min_loops) == (current.mode, "verify", 3)
    assert exit_for("high", ExitConfig(min_loops=4), 5).min_loops == 4
    assert exit_for("medium", current, 5) == current
    assert all(exit_for(effort, current, 5).after_exit == current.after_exit for effort in ("minimal", "low"))
