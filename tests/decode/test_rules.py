"""Exit rules by themselves: what is known beforehand, and whether a rule would have been met."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.decode.exits import (
    CRITERIA,
    REASON_WHEN_MET,
    ExitRule,
    exit_probabilities,
    exit_reason,
    no_gate_logits,
    select_exits,
)
from sigma0.decode.stats import PathReader
from tests.reference import decide


def rule(mode="qexit", loops=6, inner_break=False, fates=None, **values):
    return ExitRule(ExitConfig(mode=mode, **values), loops, inner_break, fates)


def test_why_a_token_stopped():
    for mode, reason in REASON_WHEN_MET.items():
        assert exit_reason(mode, True) == reason and exit_reason(mode, False) == "max_depth"
        assert exit_reason(mode, True, True) == exit_reason(mode, False, diverged=True) == "divergence"
        assert exit_reason(mode, True, True, True) == exit_reason(mode, False, forced=True) == "forced"
    assert exit_reason("full", True) == "fixed" and exit_reason("full", False, True) == "divergence"


@pytest.mark.parametrize(
    "own, expected",
    [
        (rule(q=0.25), (0.25, None, 6, 1, False, None, 2)),
        (rule(), (0.5, None, 6, 1, False, None, 2)),
        (rule("margin", theta=0.25, min_loops=9), (0.25, None, 6, 6, True, None, 2)),
        (rule("accel", eps=0.25, patience=3, min_loops=2), (0.25, None, 6, 2, False, None, 3)),
        (rule("full"), (1.0, 6, 6, 1, False, None, 2)),
        (rule("fixed", depth=4), (1.0, 4, 4, 1, False, None, 2)),
        (rule("kl", delta=0.25), (0.25, None, 6, 1, True, CRITERIA.index("kl"), 2)),
        (rule("cosine", delta=0.25), (0.25, None, 6, 1, False, CRITERIA.index("cosine"), 2)),
        (rule("argmax-stability", stable=3), (3, None, 6, 1, True, 5, 2)),
        (rule("entropy-diff"), (0.01, None, 6, 1, True, 0, 2)),
    ],
)
def test_what_a_rule_says_of_itself(own, expected):
    found = own.threshold, own.fixed_depth, own.last_loop, own.min_loops, own.needs_logits, own.criterion, own.patience
    assert found == expected and own.total_loops == 6 and own.course is None


def test_exits_that_are_known_beforehand():
    known = {"full": (True, True), "fixed 6": (True, True), "fixed 5": (True, False), "qexit": (False, False)}
    rules = {
        "full": rule("full"),
        "fixed 6": rule("fixed", depth=6),
        "fixed 5": rule("fixed", depth=5),
        "qexit": rule(),
    }
    for name, own in rules.items():
        assert (own.is_known_beforehand, own.reads_at_full_depth) == known[name], name
    broken = rule("full", inner_break=True)
    assert not broken.is_known_beforehand and not broken.reads_at_full_depth


def test_rules_that_statistics_of_loops_decide():
    about = [rule(), rule("converge"), rule("accel"), rule(q=0.999)]
    others = [rule(q=1.0), rule("margin"), rule("kl"), rule("cosine")]
    assert all(own.is_about_loops for own in about) and not any(own.is_about_loops for own in others)


def test_what_is_known_without_loops():
    margin = rule("margin", theta=0.5, min_loops=3)
    table = [(0.5, 3, True), (0.6, 4, True), (0.49, 3, None), (0.9, 2, None), (None, 5, None)]
    for lead, depth, known in table:
        assert margin.known_without_loops(depth, lead) is known
    assert rule("kl").known_without_loops(6, 0.9) is rule("cosine").known_without_loops(6, 0.9) is None
    assert rule(q=1.0).known_without_loops(6, 0.9) is False


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["qexit", "converge", "accel"]), st.sampled_from(["states", "steps"]), st.integers(0, 10**6),
    st.floats(0.05, 0.95), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
def test_statistics_say_of_a_rule_what_the_definition_says(mode, scale, seed, threshold, patience, min_loops):
    """Of a run of all loops, whose statistics another rule had computed."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    steps *= torch.rand(6, 1, generator=generator, dtype=torch.float64).cumprod(0)
    states = (torch.randn(5, generator=generator, dtype=torch.float64) + steps.cumsum(0)).float().double()
    gates = torch.randn(6, generator=generator, dtype=torch.float64)
    values = {
        "qexit": {"q": threshold}, "converge": {"eps": threshold},
        "accel": {"eps": threshold, "patience": patience, "accel_scale": scale},
    }[mode]  # fmt: skip
    own = rule(mode, min_loops=min_loops, **values)
    expected = decide(own.config, states, gates, torch.zeros(6, 2), 6)
    reader = PathReader(lambda hidden: gates.float(), rule("full").params(watch=True))
    statistics, fates = reader.read(states[None].float())
    assert statistics.shape == (1, 6, 8) and fates.shape == (1, 6)
    if expected.margin > 1e-5:
        assert own.would_have_been_met(statistics[0].numpy(), None) == expected.met


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
    told = exit_probabilities(gates)
    torch.testing.assert_close(told, torch.stack(expected).float())
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
