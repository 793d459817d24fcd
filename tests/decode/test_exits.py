"""The exit rules loop by loop, against the plain-Python decisions of the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.decode.exits import ExitRule, exit_reason, select_exits
from sigma0.decode.ops import ExitState, observe
from tests.reference import decide

ROWS, WIDTH, VOCABULARY = 9, 7, 11
MODES = ["qexit", "converge", "accel", "margin"]


def trajectory(seed: int, total: int):
    """Random loop states that shrink their steps now and then, float64 [T, N, D] with gates and logits."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(total, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    steps *= torch.rand(total, ROWS, 1, generator=generator, dtype=torch.float64).cumprod(0)
    # as float32 has them: of steps below its rounding a float64 definition would see what the decoder cannot
    states = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) + steps.cumsum(0)).float().double()
    gates = torch.randn(total, ROWS, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(total, ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
    return states, gates, logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", ["states", "steps"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    total=st.integers(1, 8),
    threshold=st.floats(0.02, 0.98),
    patience=st.integers(1, 3),
    min_loops=st.integers(1, 9),
)
def test_rows_decide_as_the_definition_says(mode, scale, seed, total, threshold, patience, min_loops):
    config = replace(
        ExitConfig(),
        mode=mode,
        q=threshold,
        eps=threshold,
        theta=threshold,
        patience=patience,
        min_loops=min_loops,
        accel_scale=scale,
    )
    states, gates, logits = trajectory(seed, total)
    rule = ExitRule(config, total)
    chosen = select_exits(
        rule, states[:, None].float(), gates[:, None].float(), lambda hidden: _head(hidden, states, logits)
    )
    for row in range(ROWS):
        expected = decide(config, states[:, row], gates[:, row], logits[:, row], total)
        if expected.margin < 1e-5:
            continue
        assert int(chosen.depths[0, row]) == (expected.depth if expected.met else total)
        assert bool(chosen.met[0, row]) == expected.met
        assert torch.equal(chosen.hidden[0, row], states[int(chosen.depths[0, row]) - 1, row].float())


def _head(hidden, states, logits):
    """The prepared logits of whichever loop `hidden` is."""
    for loop in range(len(states)):
        if torch.equal(hidden, states[loop].float()):
            return logits[loop].float()
    raise AssertionError("an unknown state")


def test_accel_holds_its_fire_on_drift_and_fires_on_a_geometric_approach():
    """The reason for our scale: the older one does the opposite on both."""
    direction = torch.tensor([[1.0, 0.0]])
    drift = torch.stack([direction * loop for loop in range(1, 9)])
    approach = torch.stack([direction * (1 - 0.5**loop) for loop in range(1, 9)])
    gates = torch.zeros(8, 1, 1)

    def met(states, scale):
        rule = ExitRule(ExitConfig(mode="accel", eps=0.1, accel_scale=scale), 8)
        return bool(select_exits(rule, states[:, None], gates, lambda hidden: hidden).met)

    assert met(approach, "states")
    assert not met(drift, "states")
    assert not met(approach, "steps")
    assert met(drift, "steps")


def test_accel_with_four_loops_and_patience_two_stops_only_at_the_end():
    states = torch.stack([torch.tensor([[1 - 0.1**loop, 0.0]]) for loop in range(1, 5)])
    rule = ExitRule(ExitConfig(mode="accel", eps=0.5, patience=2), 4)
    chosen = select_exits(rule, states[:, None], torch.zeros(4, 1, 1), lambda hidden: hidden)
    assert (int(chosen.depths), bool(chosen.met)) == (4, True)


@pytest.mark.parametrize("mode", ["qexit", "converge", "accel"])
def test_a_row_decides_by_itself(mode):
    """Rows together or apart, in whatever slots, at whatever loops: the same decisions."""
    states, gates, _ = (tensor.float() for tensor in trajectory(3, 5))
    threshold = {"q": 0.7} if mode == "qexit" else {"eps": 0.4}
    rule = ExitRule(ExitConfig(mode=mode, **threshold), 5).params(watch=True)

    def decisions(rows: list[int], slots: list[int]) -> torch.Tensor:
        state, told = ExitState.empty(12, WIDTH, torch.float32, "cpu"), []
        for loop in range(5):
            before = states[max(loop - 1, 0)][rows]
            told.append(observe(states[loop][rows], before, gates[loop][rows], state, torch.tensor(slots), rule))
        return torch.stack([each.decisions for each in told], dim=1)

    together = decisions(list(range(ROWS)), list(range(ROWS)))
    apart = [decisions([row], [11 - row]) for row in range(ROWS)]
    assert torch.equal(together, torch.cat(apart))
    assert len(together.unique()) > 1


def test_q_of_one_runs_every_loop_even_where_the_sum_rounds_to_one():
    gates = torch.full((4, 1, 1), 40.0)
    assert float(torch.sigmoid(gates[0])) == 1.0
    rule = ExitRule(ExitConfig(q=1.0), 4)
    chosen = select_exits(rule, torch.zeros(4, 1, 1, 2), gates, lambda hidden: hidden)
    assert (int(chosen.depths), bool(chosen.met)) == (4, False)


def test_reasons():
    assert exit_reason("full", False) == exit_reason("fixed", False) == "fixed"
    assert [exit_reason(mode, True) for mode in MODES] == [
        "threshold_met",
        "fixed_point",
        "accel_fixed_point",
        "confident",
    ]
    assert {exit_reason(mode, False) for mode in MODES} == {"max_depth"}


def test_a_depth_above_the_loops_is_refused():
    with pytest.raises(ValueError, match="depth=7 exceeds the model's 6 loops"):
        ExitRule(ExitConfig(mode="fixed", depth=7), 6)
