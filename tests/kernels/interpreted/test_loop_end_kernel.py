"""The loop-boundary kernel against its reference, loop by loop."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sigma0.kernels.exit_state import FATES, MODES, ExitParams, ExitState, LoopEndWeights, RuleRows
from sigma0.kernels.loop_end import observe
from sigma0.kernels.loop_end_kernel import loop_end
from tests.kernels import definitions
from tests.kernels.interpreted.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("on_device")

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def states(slots, width, dtype):
    """Two fresh states whose every other number is poison."""
    result = []
    for _ in range(2):
        state = ExitState.empty(slots, width, dtype, DEVICE)
        for tensor in (state.differences, state.gram, state.gate):
            tensor.fill_(torch.nan)
        state.counts.fill_(9)
        state.counts[:, 0] = 0
        result.append(state)
    return result


def compare(states_of_loops, rule, dtype, seed=0, strided=False):
    """Runs both over the loops `[t, R, D]`; returns the share of rows whose decision or fate differs."""
    loops, rows, width = states_of_loops.shape
    generator = torch.Generator(DEVICE).manual_seed(seed)
    gate = (0.2 * torch.randn(width, generator=generator)).to(dtype)
    weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1, dtype=dtype))
    ours, theirs = states(rows + 2, width, dtype)
    slots = torch.randperm(rows + 2, generator=generator)[:rows]
    previous = torch.full((rows, width), torch.nan, dtype=dtype)
    tolerance = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    differing = 0
    for row in states_of_loops:
        hidden = row.to(dtype)
        if strided:
            hidden = torch.stack([hidden, hidden], dim=1).flatten(0, 1)[::2]
        result = loop_end(hidden, previous, weights, ours, slots, rule)
        expected = observe(hidden, previous, hidden.float() @ gate.float(), theirs, slots, rule)
        assert torch.isfinite(result.statistics).all()
        small = expected.statistics < 1e3
        torch.testing.assert_close(result.statistics[small], expected.statistics[small], rtol=tolerance, atol=tolerance)
        differing += int(((result.fates != expected.fates) | (result.decisions != expected.decisions)).sum())
        # Both go on from the same states, so that one rounding is not told as many.
        previous = expected.hidden
        for name in ("differences", "gram", "gate", "counts"):
            getattr(ours, name).copy_(getattr(theirs, name))
    return differing / (loops * rows)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    DTYPES,
    st.sampled_from(MODES),
    st.integers(1, 7),
    st.sampled_from([3, 64, 77]),
    st.integers(1, 7),
    st.integers(0, 2**16),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2]),
)
def test_random_walks(dtype, mode, rows, width, loops, seed, strided, watch, break_after):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shrink = float(torch.empty(()).uniform_(0.3, 1.2, generator=generator))
    steps = torch.randn(loops, rows, width, generator=generator) * shrink ** torch.arange(loops)[:, None, None]
    rule = ExitParams(mode, 0.4, loops, watch=watch, break_after=break_after)
    share = compare(steps.cumsum(0), rule, dtype, seed, strided)
    assert share <= (0.0 if dtype == torch.float32 else 0.25)


def test_an_awkward_width_and_many_loops():
    generator = torch.Generator(DEVICE).manual_seed(0)
    steps = torch.randn(32, 2, 769, generator=generator) * 0.8 ** torch.arange(32)[:, None, None]
    assert compare(steps.cumsum(0), ExitParams("accel", 0.05, 32), torch.float32) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constant_trajectory(dtype):
    rule = ExitParams("converge", 0.1, 6)
    assert compare(torch.ones(6, 2, 40), rule, dtype) == 0
    assert compare(torch.zeros(6, 2, 40), rule, dtype) == 0


RULES = tuple(
    ExitParams(mode, threshold, last, patience, min_loops, break_after=break_after)
    for mode, threshold, last, patience, min_loops, break_after in (
        ("none", 0.5, 6, 1, 1, 0),
        ("none", 0.5, 7, 1, 1, 2),
        ("none", 0.5, 3, 1, 1, 0),
        ("qexit", 0.4, 7, 2, 1, 0),
        ("qexit", 0.9, 7, 2, 3, 1),
        ("qexit", 1.0, 5, 2, 1, 0),
        ("converge", 0.6, 7, 2, 1, 0),
        ("converge", 0.2, 7, 2, 5, 0),
        ("converge", 0.9, 2, 2, 4, 0),
        ("accel", 0.8, 7, 1, 1, 0),
        ("accel", 0.6, 7, 2, 5, 3),
        ("accel-steps", 0.5, 7, 2, 1, 0),
        ("accel-steps", 0.9, 6, 3, 1, 1),
    )
)


def mixed(rules, table=False):
    """Rows of the parameters of each; `table` as the settings of sequences are gathered: columns of one tensor."""
    device = torch.get_default_device()
    alone = [RuleRows.of(rule, 1, device) for rule in rules]
    rows = {
        field.name: torch.cat([getattr(item, field.name) for item in alone])
        for field in fields(RuleRows)
        if isinstance(getattr(alone[0], field.name), torch.Tensor)
    }
    if table:
        names = [name for name in rows if name != "threshold"]
        columns = torch.stack([rows[name] for name in names], dim=1)
        rows |= {name: columns[:, place] for place, name in enumerate(names)}
    modes = frozenset().union(*(item.modes for item in alone))
    return RuleRows(modes=modes, watch=alone[0].watch, growth=0.1, spiral=alone[0].spiral, **rows)


def walk(rows, width, loops, seed):
    """States that shrink and grow, `[t, R, D]`, so that each rule is met by some row and missed by others."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shrink = torch.empty(rows).uniform_(0.3, 1.3, generator=generator)[:, None]
    steps = torch.randn(loops, rows, width, generator=generator) * shrink ** torch.arange(loops)[:, None, None]
    return steps.cumsum(0)


@pytest.mark.grid(fast=1, slow=9)
@pytest.mark.parametrize("seed, table", [(0, False), (1, True)])
def test_one_launch_decides_each_row_by_its_own_rule(seed, table):
    """All modes in one batch: each row decides as the reference says, and as when every row had its rule."""
    rows, loops, width = len(RULES), 7, 33
    path = walk(rows, width, loops, seed)
    gate = 0.2 * torch.randn(width, generator=torch.Generator(DEVICE).manual_seed(seed))
    weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1))
    slots = torch.randperm(rows + 2, generator=torch.Generator(DEVICE).manual_seed(seed))[:rows]
    together, reference = states(rows + 2, width, torch.float32)
    alone = [states(1, width, torch.float32)[0] for _ in RULES]
    previous, rules, seen = torch.full_like(path[0], torch.nan), mixed(RULES, table), set()
    for hidden in path:
        result = loop_end(hidden, previous, weights, together, slots, rules)
        plain = observe(hidden, previous, hidden @ gate, reference, slots, rules)
        assert torch.equal(result.decisions, plain.decisions) and torch.equal(result.fates, plain.fates)
        for row, rule in enumerate(RULES):
            current = hidden[row : row + 1], previous[row : row + 1]
            one = loop_end(*current, weights, alone[row], torch.tensor([0]), rule)
            for name in ("statistics", "fates", "decisions"):
                assert torch.equal(getattr(one, name)[0], getattr(result, name)[row])
            seen.add((rule.mode, int(result.decisions[row])))
        previous = hidden
    assert {(mode, 1) for mode in MODES if mode != "none"} <= seen and {("none", 2), ("qexit", 0)} <= seen


def test_rows_that_only_follow_the_gate_decide_each_by_its_own():
    rules = tuple(ExitParams("qexit", threshold, 4, watch=False) for threshold in (0.2, 0.7, 0.95, 1.0))
    path = walk(4, 20, 4, 5)
    gate, slots = torch.full((20,), 0.05), torch.arange(4)
    weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1))
    ours, theirs = states(4, 20, torch.float32)
    for hidden in path:
        result = loop_end(hidden, hidden, weights, ours, slots, mixed(rules))
        plain = observe(hidden, hidden, hidden @ gate, theirs, slots, mixed(rules))
        assert torch.equal(result.decisions, plain.decisions)
        torch.testing.assert_close(result.statistics, plain.statistics)
    assert result.decisions.tolist()[3] == 2 and ours.counts[:, 0].tolist() == [4] * 4


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DTYPES, st.sampled_from(MODES), st.integers(1, 6), st.integers(0, 2**16))
@pytest.mark.slow
def test_as_near_to_float64_as_plain_torch(dtype, mode, loops, seed):
    """The largest error against the definitions in float64 over some rows is at most twice that of the reference.

    Over some rows, since of one the reference may be right by luck.
    """
    generator, rows = torch.Generator(DEVICE).manual_seed(seed), 6
    steps = torch.randn(loops, rows, 33, generator=generator) * 0.7 ** torch.arange(loops)[:, None, None]
    states_of_loops = steps.cumsum(0).to(dtype)
    gate = torch.randn(33, generator=generator).to(dtype)
    weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1, dtype=dtype))
    rule, slots = ExitParams(mode, 0.4, loops), torch.arange(rows) + 1
    ours, theirs = states(rows + 1, 33, dtype)
    previous = states_of_loops[0]
    for hidden in states_of_loops:
        kernel = loop_end(hidden, previous, weights, ours, slots, rule)
        plain = observe(hidden, previous, hidden.float() @ gate.float(), theirs, slots, rule)
        previous = hidden
    exact = states_of_loops.double().cpu().numpy()
    logits = exact @ gate.double().cpu().numpy()
    eps = torch.finfo(dtype).eps
    expected = torch.stack(
        [
            torch.tensor(definitions.loop_end(exact[:, row], logits[:, row], mode, 0.4, loops, eps=eps)[0]).double()
            for row in range(rows)
        ]
    )
    scale = expected.abs().clamp_min(1)
    errors = [((result.statistics.double() - expected).abs() / scale).amax(0) for result in (kernel, plain)]
    # kept differences are rounded to the dtype, by eps / 2 at most: which of both that hurts more is chance
    assert bool((errors[0] <= 2 * errors[1] + max(5e-4, eps / 4)).all())


def test_a_steady_drift_spirals():
    """Steps that neither grow nor shrink: the fate at a growth of exactly 1, in both."""
    drift = torch.arange(1.0, 7.0)[:, None, None] * torch.ones(1, 1, 64)
    rule = ExitParams("none", 0.5, 6)
    assert compare(drift, rule, torch.float32) == 0
    ours, _ = states(1, 64, torch.float32)
    weights = LoopEndWeights(None, 0.0, torch.zeros(64), torch.zeros(1))
    previous, fates = torch.zeros(1, 64), []
    for hidden in drift:
        boundary = loop_end(hidden, previous, weights, ours, torch.tensor([0]), rule)
        previous = hidden
        fates.append(FATES[int(boundary.fates[0])])
    assert fates == [None, None, *["spiral"] * 4]


def test_what_does_not_fit_is_refused():
    state, slots = ExitState.empty(2, 8, torch.float32, DEVICE), torch.tensor([0])
    row, vector, rule = torch.zeros(1, 8), torch.zeros(8), ExitParams("none", 0.5, 3)
    two, one = (RuleRows.of(ExitParams("qexit", 0.5, 3), rows, DEVICE) for rows in (2, 1))
    for hidden, previous, gate, place, rules, message in (
        (row.double(), row, vector, slots, rule, "float64"),
        (row, row[:, :4], vector, slots, rule, "previous"),
        (row, row, vector[:4], slots, rule, "a gate"),
        (row, row, vector.half(), slots, rule, "one dtype"),
        (row, row, vector, slots[:0], rule, "slots"),
        (torch.zeros(1, 16)[:, ::2], row, vector, slots, rule, "side by side"),
        (row, row, vector, slots, two, "1 rows need one threshold"),
        (row, row, vector, slots, replace(one, threshold=one.threshold.double()), "thresholds are float32"),
        (row, row, vector, slots, replace(one, mode=one.mode.int()), "thresholds are float32"),
    ):
        weights = LoopEndWeights(None, 0.0, gate, torch.zeros(1))
        with pytest.raises(ValueError, match=message):
            loop_end(hidden, previous, weights, state, place, rules)
