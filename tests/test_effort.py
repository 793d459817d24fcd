import pytest

import sigma0
from sigma0.config import SHARES, ExitConfig, exit_for


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


def test_high_writes_the_text_of_full_depth(pocket):
    model, tokenizer = pocket
    current = model.resolve_exit_config(None)
    story = "Leo is 2 years older than Tom. Tom is 4 years old. How old is Leo?"
    texts = {
        effort: sigma0.generate(model, tokenizer, story, exit_config=exit_for(effort, current, model.num_loops))
        for effort in SHARES
    }
    full = sigma0.generate(model, tokenizer, story, exit_config=ExitConfig(mode="full"))
    assert texts["high"].text == full.text and texts["high"].verdict.converged is not None
    assert full.verdict.converged is None
