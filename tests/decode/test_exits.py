"""Exit rules: loop by loop as the plain-Python decisions of the reference, what is known beforehand, and afterwards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.decode.exits import (
    REASON_WHEN_MET,
    ExitRule,
    exit_probabilities,
    exit_reason,
    no_gate_logits,
    select_exits,
)
from sigma0.decode.stats import PathReader
from tests.reference import decide, setting

ROWS, WIDTH, VOCABULARY = 9, 7, 11


def rule(mode="qexit", loops=6, inner_break=False, fates=None, **values):
    return ExitRule(ExitConfig(mode=mode, **values), loops, inner_break, fates)


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


@pytest.mark.parametrize("mode", ["qexit", "converge", "accel", "margin"])
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
    """Also of a run of all loops, whose statistics another rule had computed."""
    limits = dict.fromkeys(("q", "eps", "theta"), threshold)
    config = setting(mode, patience=patience, min_loops=min_loops, accel_scale=scale, **limits)
    states, gates, logits = trajectory(seed, total)
    current = ExitRule(config, total)
    chosen = select_exits(
        current, states[:, None].float(), gates[:, None].float(), lambda hidden: _head(hidden, states, logits)
    )
    if current.is_about_loops:
        reader = PathReader(lambda hidden: gates.T.flatten().float(), rule("full", total).params(watch=True))
        statistics, fates = reader.read(states.transpose(0, 1).float())
        assert statistics.shape == (ROWS, total, 8) and fates.shape == (ROWS, total)
    for row in range(ROWS):
        expected = decide(config, states[:, row], gates[:, row], logits[:, row], total)
        if expected.margin < 1e-5:
            continue
        assert int(chosen.depths[0, row]) == (expected.depth if expected.met else total)
        assert bool(chosen.met[0, row]) == expected.met
        assert torch.equal(chosen.hidden[0, row], states[int(chosen.depths[0, row]) - 1, row].float())
        if current.is_about_loops:
            assert current.would_have_been_met(statistics[row].numpy(), None) == expected.met


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
        current = rule("accel", 8, eps=0.1, accel_scale=scale)
        return bool(select_exits(current, states[:, None], gates, lambda hidden: hidden).met)

    assert met(approach, "states")
    assert not met(drift, "states")
    assert not met(approach, "steps")
    assert met(drift, "steps")


def test_q_of_one_runs_every_loop_even_where_the_sum_rounds_to_one():
    gates = torch.full((4, 1, 1), 40.0)
    assert float(torch.sigmoid(gates[0])) == 1.0
    chosen = select_exits(rule(loops=4, q=1.0), torch.zeros(4, 1, 1, 2), gates, lambda hidden: hidden)
    assert (int(chosen.depths), bool(chosen.met)) == (4, False)


def test_why_a_token_stopped():
    for mode, reason in REASON_WHEN_MET.items():
        assert exit_reason(mode, True) == reason and exit_reason(mode, False) == "max_depth"
        assert exit_reason(mode, True, True) == exit_reason(mode, False, diverged=True) == "divergence"
        assert exit_reason(mode, True, True, True) == exit_reason(mode, False, forced=True) == "forced"
    assert exit_reason("full", True) == "fixed" and exit_reason("full", False, True) == "divergence"


def test_exits_that_are_known_beforehand():
    known = {"full": (True, True), "fixed 6": (True, True), "fixed 5": (True, False), "qexit": (False, False)}
    rules = {
        "full": rule("full"),
        "fixed 6": rule("fixed", depth=6),
        "fixed 5": rule("fixed", depth=5),
        "qexit": rule(),
    }
    for name, current in rules.items():
        assert (current.is_known_beforehand, current.reads_at_full_depth) == known[name], name
    broken = rule("full", inner_break=True)
    assert not broken.is_known_beforehand and not broken.reads_at_full_depth


def test_rules_that_statistics_of_loops_decide():
    about = [rule(), rule("converge"), rule("accel"), rule(q=0.999)]
    others = [rule(q=1.0), rule("margin"), rule("kl"), rule("cosine")]
    assert all(current.is_about_loops for current in about) and not any(current.is_about_loops for current in others)


def test_what_is_known_without_loops():
    margin = rule("margin", theta=0.5, min_loops=3)
    table = [(0.5, 3, True), (0.6, 4, True), (0.49, 3, None), (0.9, 2, None), (None, 5, None)]
    for lead, depth, known in table:
        assert margin.known_without_loops(depth, lead) is known
    assert rule("kl").known_without_loops(6, 0.9) is rule("cosine").known_without_loops(6, 0.9) is None
    assert rule(q=1.0).known_without_loops(6, 0.9) is False


def test_a_model_without_a_gate_never_leaves():
    hidden = torch.zeros(3, 2, dtype=torch.bfloat16)
    gates = no_gate_logits(hidden)
    assert gates.tolist() == [-math.inf] * 3 and gates.dtype == hidden.dtype
    chosen = select_exits(rule(q=0.001), torch.zeros(4, 1, 3, 2), None, lambda states: states)
    assert chosen.depths.tolist() == [[4, 4, 4]] and not chosen.met.any()


def test_chances_to_leave_are_a_distribution():
    gates = torch.tensor([[0.0, 3.0], [-1.0, 40.0], [2.0, 0.0]])
    hazards = torch.sigmoid(gates.double())
    expected = [hazards[0], (1 - hazards[0]) * hazards[1], (1 - hazards[0]) * (1 - hazards[1])]
    output = exit_probabilities(gates)
    torch.testing.assert_close(output, torch.stack(expected).float())
    assert exit_probabilities(gates[:1]).tolist() == [[1.0, 1.0]]


def test_at_full_depth_a_rule_is_only_noted():
    gates = torch.full((4, 1, 2), -9.0)
    gates[1, 0, 1] = 9.0
    states = torch.arange(8.0).view(4, 1, 2, 1)
    early = select_exits(rule(loops=4), states, gates, lambda hidden: hidden)
    assert early.depths.tolist() == [[4, 2]] and early.met.tolist() == [[False, True]]
    assert early.hidden.flatten().tolist() == [6.0, 3.0]
    late = select_exits(rule(loops=4), states, gates, lambda hidden: hidden, at_full_depth=True)
    assert late.depths.tolist() == [[4, 4]] and late.met.tolist() == [[False, True]]
    assert late.hidden.flatten().tolist() == [6.0, 7.0] and not late.diverged.any()
