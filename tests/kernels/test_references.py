"""The torch references, which a CPU runs, against the definitions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.collapse import CollapseRule, CollapseState, collapse_reference, leads_reference
from sigma0.kernels.exit_state import FATES, MODES, ExitParams, ExitState, LoopEndWeights, RuleRows
from sigma0.kernels.loop_end import loop_end_reference, observe
from tests.kernels import definitions

PARAMETERS = ("mode", "threshold", "last_loop", "patience", "min_loops", "break_after")


def run_loops(states, rule, gate_weight=None, dtype=torch.float32):
    """Boundaries of loops 1 to t of one token whose block gives `states` `[t, D]`."""
    width = states.shape[1]
    state, slots = ExitState.empty(3, width, dtype, "cpu"), torch.tensor([1])
    gate = torch.zeros(width) if gate_weight is None else gate_weight
    previous, result = torch.full((1, width), torch.nan, dtype=dtype), []
    for row in states:
        hidden = row[None].to(dtype)
        boundary = observe(hidden, previous, hidden.float() @ gate, state, slots, rule)
        previous = hidden
        result.append(boundary)
    return result


def planar(radius, angle, width=512, loops=8, scale=1.0, seed=0):
    """h_{k+1} = A h_k + c with A a rotation and scaling in a random plane."""
    rng = np.random.default_rng(seed)
    plane, _ = np.linalg.qr(rng.standard_normal((width, 2)))
    turn = radius * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    matrix, shift, hidden = plane @ turn @ plane.T, rng.standard_normal(width), rng.standard_normal(width)
    states = []
    for _ in range(loops):
        hidden = matrix @ hidden + shift
        states.append(hidden * scale)
    return torch.tensor(np.array(states), dtype=torch.float32)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(2, 40), st.integers(0, 2**16))
def test_each_row_tells_what_the_definitions_say_and_decides_by_its_own_rule(data, width, seed):
    """Rows of any rules in one call tell and decide as each does alone, and as the definitions say."""
    rows, loops = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    rules = [
        ExitParams(
            data.draw(st.sampled_from(MODES)),
            data.draw(st.floats(0.02, 1.2) | st.just(1.0)),
            data.draw(st.integers(1, 9)),
            data.draw(st.integers(1, 3)),
            data.draw(st.integers(1, 4)),
            break_after=data.draw(st.integers(0, 2)),
        )
        for _ in range(rows)
    ]
    alone = [RuleRows.of(rule, 1, torch.device("cpu")) for rule in rules]
    together = replace(
        alone[0],
        modes=frozenset().union(*(item.modes for item in alone)),
        **{name: torch.cat([getattr(item, name) for item in alone]) for name in PARAMETERS},
    )
    rng = np.random.default_rng(seed)
    shrink = rng.uniform(0.3, 1.3, (rows, 1))
    steps = np.stack([rng.standard_normal((rows, width)) * shrink**loop for loop in range(loops)])
    path = torch.from_numpy(np.cumsum(steps, 0)).float()
    logits = torch.from_numpy(rng.standard_normal((loops, rows))).float()
    state, slots = ExitState.empty(rows + 1, width, torch.float32, "cpu"), torch.from_numpy(rng.permutation(rows))
    states = [ExitState.empty(1, width, torch.float32, "cpu") for _ in rules]
    previous, diverging = torch.full_like(path[0], torch.nan), [0] * rows
    for loop, hidden in enumerate(path):
        result = observe(hidden, previous, logits[loop], state, slots, together)
        assert torch.isfinite(result.statistics).all()
        for row, rule in enumerate(rules):
            current = slice(row, row + 1)
            one = observe(
                hidden[current], previous[current], logits[loop, current], states[row], torch.tensor([0]), rule
            )
            assert int(result.decisions[row]) == int(one.decisions) and int(result.fates[row]) == int(one.fates)
            expected, fate, decision = definitions.loop_end(
                path[: loop + 1, row].double().numpy(),
                logits[: loop + 1, row].double().numpy(),
                rule.mode,
                rule.threshold,
                rule.last_loop,
                rule.patience,
                rule.min_loops,
                eps=torch.finfo(torch.float32).eps,
            )
            np.testing.assert_allclose(one.statistics[0], expected, rtol=2e-3, atol=2e-3)
            diverging[row] = diverging[row] + 1 if fate == "diverge" else 0
            if decision != 1 and rule.break_after and diverging[row] >= rule.break_after:
                decision = 3
            assert (FATES[int(result.fates[row])], int(result.decisions[row])) == (fate, decision), rule
        previous = hidden


def test_rules_that_cannot_be_decided_are_refused():
    rows = RuleRows.of(ExitParams("converge", 0.1, 4), 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="converge cannot be decided where no differences are kept"):
        replace(rows, watch=False)
    with pytest.raises(ValueError, match="no such modes: margin, none"):
        replace(rows, modes=frozenset({"none", "margin", "qexit"}))


def test_leads_asks_each_row_for_its_own_theta():
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
    margin = math.tanh(1.0)
    thetas = torch.tensor([margin - 1e-3, margin + 1e-3, torch.inf, 0.0])
    assert leads_reference(logits, thetas).tolist() == [True, False, False, True]
    assert leads_reference(logits, margin - 1e-3).tolist() == [True, True, True, False]


@pytest.mark.parametrize("radius, angle", [(0.9, 75.0), (1.3, 20.0), (0.5, 57.0), (0.99, 120.0)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_a_hidden_rotation_comes_back(radius, angle, scale):
    output = run_loops(planar(radius, math.radians(angle), scale=scale), ExitParams("none", 0.5, 99))
    statistics = output[-1].statistics[0]
    assert float(statistics[4]) == pytest.approx(radius, abs=1e-3)
    assert float(statistics[5]) == pytest.approx(math.radians(angle), abs=1e-3)


def fates(states, dtype=torch.float32):
    output = run_loops(states, ExitParams("none", 0.5, 99), dtype=dtype)
    return [FATES[int(item.fates)] for item in output]


def test_fates_of_known_maps():
    rng = np.random.default_rng(1)
    diagonal, hidden, states = rng.uniform(0.1, 0.9, 64), rng.standard_normal(64), []
    for _ in range(9):
        hidden = diagonal * hidden + 1
        states.append(hidden)
    assert fates(torch.tensor(np.array(states)))[2:] == ["contract"] * 7
    assert fates(planar(1.3, 0.3))[3:] == ["diverge"] * 5
    assert fates(planar(0.9, math.radians(75)))[3:] == ["spiral"] * 5
    assert fates(torch.ones(6, 32)) == [None, None, *["contract"] * 4]


def test_a_path_that_shrank_may_take_a_longer_step():
    axes, direction, path = torch.eye(16), torch.eye(16)[0], [torch.ones(16)]
    for number, size in enumerate([1.0, 0.3, 0.5, 0.9, 1.2], start=1):
        path.append(path[-1] + size * direction)
        direction = (direction + axes[number]) / math.sqrt(2)  # 45 degrees on: no spiral, and no fit that speaks
    assert fates(torch.stack(path))[2:] == ["contract", "contract", "contract", "diverge"]


def test_noise_and_walks_do_not_diverge():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        point = torch.randn(768, generator=generator)
        near = point * (1 + 2**-9 * (torch.rand(9, 768, generator=generator) - 0.5))
        assert "diverge" not in fates(near, torch.bfloat16)
        walk = point + torch.randn(9, 768, generator=generator).cumsum(0)
        assert "diverge" not in fates(walk)


@pytest.mark.exhaustive
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(1, 150), st.integers(0, 2**16), st.booleans())
def test_collapse_tells_what_the_definitions_say(vocabulary, tokens, seed, greedy):
    rng = np.random.default_rng(seed)
    state, ids, entropies = CollapseState.empty(3, "cpu"), [], []
    period = rng.integers(1, 40)
    for number in range(tokens):
        logits = rng.standard_normal(vocabulary).astype(np.float32).round(1)
        if number % 5 == 2:
            logits[:] = 0.5
        if number % 3 == 1:
            logits[rng.integers(0, vocabulary)] = -np.inf
        chosen = None if greedy else int(rng.integers(0, vocabulary) if number < period else ids[-period])
        output = collapse_reference(
            torch.from_numpy(logits)[None],
            None if greedy else torch.tensor([chosen]),
            state,
            torch.tensor([1]),
            CollapseRule(),
        )
        expected, top, ids = definitions.collapse(logits, ids, chosen, entropies)
        entropies.append(expected[0])
        np.testing.assert_allclose(output.statistics[0, :7], expected, rtol=1e-4, atol=2e-4)
        assert output.top[0].tolist() == top and int(output.token_ids) == ids[-1]
        assert 0 <= float(output.statistics[0, 7]) <= 1


def test_the_whole_reference_is_its_parts():
    generator = torch.Generator().manual_seed(0)
    hidden, previous = torch.randn(3, 40, generator=generator), torch.randn(3, 40, generator=generator)
    weights = LoopEndWeights(None, 0.0, torch.randn(40, generator=generator), torch.ones(1))
    rule, slots = ExitParams("qexit", 0.4, 5), torch.tensor([2, 0, 1])
    states = [ExitState.empty(3, 40, torch.float32, "cpu") for _ in range(2)]
    whole = loop_end_reference(hidden, previous, weights, states[0], slots, rule)
    parts = observe(hidden, previous, hidden @ weights.gate + 1, states[1], slots, rule)
    torch.testing.assert_close(whole.statistics, parts.statistics)
    assert torch.equal(whole.decisions, parts.decisions)
    torch.testing.assert_close(
        whole.statistics[:, 7].double(), torch.sigmoid(hidden.double() @ weights.gate.double() + 1)
    )


def test_a_few_ids_that_repeat_are_no_collapse():
    state, flat = CollapseState.empty(1, "cpu"), torch.zeros(1, 9)
    output = [
        float(collapse_reference(flat, torch.tensor([3]), state, torch.tensor([0]), CollapseRule()).statistics[0, 7])
        for _ in range(40)
    ]
    assert max(output[:12]) < 0.4 and output == sorted(output) and output[-1] > 0.8
