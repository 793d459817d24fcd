"""Statistics of logits and ids in C++, against those in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.collapse import CollapseRule, CollapseState, Part, certainty, collapse_reference
from sigma0.kernels.collapse_rows import TextMemory, certainty_rows, collapse_rows
from tests.marks import needs_library

pytestmark = needs_library

RULES = [
    CollapseRule(),
    CollapseRule(sameness=Part(0.1, 0.7, 0.3), drop=Part(0.2, 2.0, 0.4), margin=Part(0.1, 0.9, 0.5)),
]


@st.composite
def texts(draw):
    """Ids with spans that come back, with and without faults, between others."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids = []
    for _ in range(draw(st.integers(1, 3))):
        span = rng.integers(0, draw(st.sampled_from([2, 5, 300])), draw(st.integers(1, 70)))
        part = np.resize(span, draw(st.integers(1, 260)))
        faults = rng.random(len(part)) < draw(st.sampled_from([0.0, 0.05]))
        ids += np.where(faults, rng.integers(0, 300, len(part)), part).tolist()
    return ids


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(texts(), min_size=1, max_size=3), st.sampled_from(RULES), st.integers(0, 10**6))
def test_numbers_are_those_of_the_formula(ids, rule, seed):
    """Of several texts of different lengths, an id of each in a call; repetition to the last bit."""
    rng = np.random.default_rng(seed)
    memories, state = [TextMemory() for _ in ids], CollapseState.empty(len(ids), "cpu")
    for number in range(max(map(len, ids))):
        current = [row for row, text in enumerate(ids) if number < len(text)]
        logits = torch.from_numpy(rng.normal(0, 3, (len(current), 7))).float()
        logits[torch.from_numpy(rng.random(len(current)) < 0.05)] = torch.nan
        new = [ids[row][number] for row in current]
        output = torch.tensor(
            collapse_rows([memories[row] for row in current], new, certainty_rows(logits), rule), dtype=torch.float64
        )
        expected = collapse_reference(logits, torch.tensor(new), state, torch.tensor(current), rule).statistics.T
        assert torch.equal(output[3:7].float(), expected[3:7])
        torch.testing.assert_close(output[:-1].float(), expected, atol=1e-4, rtol=1e-4, equal_nan=True)
        weight = min(1.0, max(0.0, (number - 2) / 37))
        alone = rule.proximity(output[3], output[5] * weight, 1 - output[6], 0 * output[3], 0 * output[3])
        torch.testing.assert_close(output[-1], alone, atol=1e-12, rtol=0)


def test_ids_of_one_text_may_come_in_one_call():
    ids = np.resize(np.arange(37), 700).tolist()
    one, other = TextMemory(), TextMemory()
    together = collapse_rows([one] * len(ids), ids, None, RULES[0])
    apart = [collapse_rows([other], [item], None, RULES[0]) for item in ids]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))


def test_a_text_is_that_of_the_formula():
    rng, rule = np.random.default_rng(2), RULES[1]
    ids = np.concatenate([rng.integers(0, 40, 60), np.resize(rng.integers(0, 40, 11), 120)])
    logits = torch.from_numpy(rng.normal(0, 3, (len(ids), 50))).float()
    memory, state, slot = TextMemory(), CollapseState.empty(1, "cpu"), torch.tensor([0])
    for token_id, row in zip(ids.tolist(), logits, strict=True):
        output = torch.tensor(collapse_rows([memory], [token_id], certainty_rows(row[None]), rule))[:-1, 0]
        expected = collapse_reference(row[None], torch.tensor([token_id]), state, slot, rule).statistics[0]
        torch.testing.assert_close(output.float(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("width", [2, 5, 16, 17, 600, 4099])
@pytest.mark.parametrize("scale", [0.1, 1, 10, 100])
def test_entropy_and_margin_are_those_in_torch(width, scale):
    logits = torch.randn(8, width, generator=torch.Generator().manual_seed(width)) * scale
    logits[1, 0] = -torch.inf
    logits[2] = torch.nan
    logits[3, -1] = torch.nan
    logits[4, 1] = torch.inf
    logits[5, 1:] = -torch.inf
    logits[6] = logits[6, 0]
    output = certainty_rows(logits)
    expected = torch.stack(certainty(logits.double().float()))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert output[:, 2:5].isnan().all() and output[:, 5].tolist() == [0.0, 1.0]
    for strided in (logits.T.contiguous().T, logits.repeat(1, 2)[:, :width], logits[:1].expand(8, -1)):
        torch.testing.assert_close(certainty_rows(strided)[:, 0], output[:, 0])
    half = logits.bfloat16()
    torch.testing.assert_close(certainty_rows(half), torch.stack(certainty(half)), atol=1e-5, rtol=1e-5, equal_nan=True)
