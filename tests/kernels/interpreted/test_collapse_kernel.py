"""The collapse kernel against its reference, token by token."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sigma0.kernels.collapse import CollapseRule, CollapseState, collapse_reference, leads_reference
from sigma0.kernels.collapse_kernel import collapse, margin_met
from tests.kernels import definitions
from tests.kernels.interpreted.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("on_device")


def compare(logits, chosen, states, rule):
    """Both of the same logits: their numbers, broken ones too, and what is kept of them."""
    slots = torch.arange(len(logits)).flip(0) + 1
    bare, plain = (item(logits, chosen, None, None, rule) for item in (collapse, collapse_reference))
    whole = plain.statistics.isfinite().all(1)
    for name, value in vars(plain).items():
        torch.testing.assert_close(getattr(bare, name)[whole], value[whole], rtol=1e-4, atol=1e-4)
    expected = collapse_reference(logits, chosen, states[0], slots, rule)
    result = collapse(logits, chosen, states[1], slots, rule)
    assert torch.isfinite(result.statistics[:, 2:]).all()
    torch.testing.assert_close(result.statistics, expected.statistics, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(result.token_ids, expected.token_ids) and torch.equal(result.met, expected.met)
    assert torch.equal(result.top[whole], expected.top[whole])
    for name in ("ids", "lengths", "observed"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name))
    torch.testing.assert_close(states[0].entropy, states[1].entropy, rtol=1e-4, atol=1e-4)
    return result


def filled(rows, length, period, vocabulary):
    """Two states of sequences that are `length` ids long, of a period."""
    states = [CollapseState.empty(rows + 1, DEVICE) for _ in range(2)]
    for state in states:
        numbers = torch.arange(128) + max(0, length - 128)
        state.ids[:] = (numbers % period % vocabulary).int().roll(max(0, length - 128) % 128)
        state.lengths.fill_(length)
    return states


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(1, 3),
    st.sampled_from([2, 7, 300, 2100]),
    st.sampled_from([0, 2, 60, 127, 128, 300]),
    st.integers(1, 40),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_random_logits(dtype, rows, vocabulary, length, period, seed, greedy):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    states = filled(rows, length, period, vocabulary)
    for number in range(3):
        wide = (3 * torch.randn(rows, 2 * vocabulary, generator=generator)).to(dtype)
        logits = wide[:, ::2] if number % 2 else wide[:, :vocabulary]
        if number == 1:
            logits = logits.clone()
            logits[:, int(torch.randint(0, vocabulary, (), generator=generator))] = -torch.inf
        chosen = None if greedy else torch.randint(0, vocabulary, (rows,), generator=generator)
        compare(logits, chosen, states, CollapseRule(theta=0.2))


@pytest.mark.slow
def test_logits_that_are_no_numbers_are_told_and_forgotten():
    """NaN and infinity in a row: the same reading and the same memory from both, and none of it in what follows."""
    rng, states = torch.Generator(DEVICE).manual_seed(0), [CollapseState.empty(5, DEVICE) for _ in range(2)]
    for token in range(12):
        logits = torch.randn(4, 60, generator=rng)
        if token in (0, 9):
            logits[0, 3], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
        result = compare(logits, torch.full((4,), 7), states, CollapseRule())
        assert result.statistics[:, 0].isnan().tolist() == [token in (0, 9)] * 3 + [False]
    assert states[0].observed.tolist() == [0, 12, 10, 10, 10] and states[0].entropy.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float64_definitions(dtype):
    """Seven strided rows of a large vocabulary, token after token, masked here and there."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    rows, vocabulary, tokens = 7, 50257, 2
    state, slots = CollapseState.empty(rows, DEVICE), torch.arange(rows)
    ids, entropies = [[] for _ in range(rows)], [[] for _ in range(rows)]
    for token in range(tokens):
        logits = (2 * torch.randn(rows, 2 * vocabulary, generator=generator)).to(dtype)[:, ::2]
        if token:
            logits = logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.3, -torch.inf)
        result = collapse(logits, None, state, slots, CollapseRule())
        for row in range(rows):
            wide = logits[row].double().cpu().numpy()
            expected, top, ids[row] = definitions.collapse(wide, ids[row], None, entropies[row])
            entropies[row].append(expected[0])
            torch.testing.assert_close(
                result.statistics[row, :7].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4
            )
            assert result.top[row].tolist() == top


@pytest.mark.parametrize("vocabulary", [2, 129, 2049])
def test_equals_and_masks(vocabulary):
    states = filled(3, 5, 2, vocabulary)
    logits = torch.full((3, vocabulary), -torch.inf)
    logits[0] = 1.5
    logits[1, -1] = 2.0
    logits[2, -2:] = 0.25
    result = compare(logits, None, states, CollapseRule(theta=0.5))
    assert result.token_ids.tolist() == [0, vocabulary - 1, vocabulary - 2]
    assert result.met.tolist() == [False, True, False]


def test_what_does_not_fit_is_refused():
    state = CollapseState.empty(2, DEVICE)
    slots = torch.arange(2)
    for logits, chosen, message in (
        (torch.zeros(2, 5).double(), None, "float64"),
        (torch.zeros(3, 5), None, "a slot for each row"),
        (torch.zeros(2, 1), None, "2 ids"),
        (torch.zeros(2, 5), torch.zeros(2), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            collapse(logits, chosen, state, slots, CollapseRule())


def test_strided_ids_and_slots_are_read_as_they_are():
    logits = torch.zeros(3, 9)
    chosen, slots = torch.tensor([[1, 2], [3, 4], [5, 6]])[:, 0], torch.tensor([[2, 9], [0, 9], [1, 9]])[:, 0]
    states = [CollapseState.empty(3, DEVICE) for _ in range(2)]
    result = collapse(logits, chosen, states[1], slots, CollapseRule())
    collapse_reference(logits, chosen, states[0], slots, CollapseRule())
    assert result.token_ids.tolist() == [1, 3, 5] and torch.equal(states[0].ids, states[1].ids)
    state = CollapseState(states[0].ids.t().contiguous().t(), *list(vars(states[0]).values())[1:])
    with pytest.raises(ValueError, match="side by side"):
        collapse(logits, chosen, state, slots, CollapseRule())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_leads_by_its_own_theta(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (3 * torch.randn(9, 300, generator=generator)).to(dtype)
    logits[6], logits[7, 4], logits[8] = 0.0, torch.nan, -torch.inf
    logits[8, 2] = 1.0
    best = torch.softmax(logits.double(), -1).topk(2, dim=-1).values
    margins = best[:, 0] - best[:, 1]
    thetas = margins.float() * torch.tensor([0.99, 1.01, 0.0, 5.0, 0.5, torch.inf, 1.0, 0.1, 1.0])
    expected = [True, False, True, False, True, False, True, False, True]
    thetas[7] = 0.0
    assert margin_met(logits, thetas).tolist() == leads_reference(logits, thetas).tolist() == expected
    strided = torch.stack([thetas, thetas], dim=1)[:, 1]
    assert margin_met(logits, strided).tolist() == expected
    for theta in (0.0, 0.05, 0.3, torch.inf):
        alone = margin_met(logits, theta)
        assert torch.equal(alone, leads_reference(logits, theta))
        assert torch.equal(alone, margin_met(logits, torch.full((9,), theta)))


def test_thetas_of_other_rows_are_refused():
    for thetas in (torch.ones(2), torch.ones(3).double(), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"theta must be float32 \[3\]"):
            margin_met(torch.zeros(3, 5), thetas)
