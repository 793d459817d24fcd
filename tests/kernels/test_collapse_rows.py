"""Statistics of logits and ids in C++, against those in torch and in Python's own numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.decode.repetition import EntropyDrop, Repetition
from sigma0.decode.stats import collapse_of
from sigma0.kernels.collapse import CollapseRule, CollapseState, Part, certainty, collapse_reference
from sigma0.kernels.collapse_rows import TextMemory, certainty_rows, collapse_rows
from tests.decode.test_repetition import texts
from tests.marks import needs_library

pytestmark = needs_library

RULES = [
    CollapseRule(),
    CollapseRule(sameness=Part(0.1, 0.7, 0.3), drop=Part(0.2, 2.0, 0.4), margin=Part(0.1, 0.9, 0.5)),
]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(texts(), min_size=1, max_size=3), st.sampled_from(RULES), st.booleans(), st.integers(0, 10**6))
def test_numbers_are_those_that_python_counts(ids, rule, certain, seed):
    """Of several texts of different lengths, an id of each in a call."""
    rng = np.random.default_rng(seed)
    memories, counted = [TextMemory() for _ in ids], [(Repetition(), EntropyDrop()) for _ in ids]
    for number in range(max(map(len, ids))):
        own = [row for row, text in enumerate(ids) if number < len(text)]
        sure = rng.random((2, len(own))).astype(np.float32)
        sure[:, rng.random(len(own)) < 0.05] = np.nan
        new = [ids[row][number] for row in own]
        told = collapse_rows([memories[row] for row in own], new, torch.from_numpy(sure) if certain else None, rule)
        for place, row in enumerate(own):
            repetition, drop = counted[row]
            repetition.append(new[place])
            entropy, margin = sure[:, place].tolist() if certain else (np.nan, np.nan)
            numbers = collapse_of(entropy, margin, repetition.at(-1), drop, rule)
            np.testing.assert_array_equal(told[:-1, place].numpy(), np.array(numbers, dtype=np.float32))
            assert told[-1, place].item() == repetition.at(-1).proximity(rule)


def test_ids_of_one_text_may_come_in_one_call():
    ids = np.resize(np.arange(37), 700).tolist()
    one, other = TextMemory(), TextMemory()
    together = collapse_rows([one] * len(ids), ids, None, RULES[0])
    assert torch.equal(
        together[2:], torch.cat([collapse_rows([other], [each], None, RULES[0])[2:] for each in ids], dim=1)
    )


def test_a_text_is_that_of_the_formula():
    rng, rule = np.random.default_rng(2), RULES[1]
    ids = np.concatenate([rng.integers(0, 40, 60), np.resize(rng.integers(0, 40, 11), 120)])
    logits = torch.from_numpy(rng.normal(0, 3, (len(ids), 50))).float()
    memory, state, slot = TextMemory(), CollapseState.empty(1, "cpu"), torch.tensor([0])
    for token_id, row in zip(ids.tolist(), logits, strict=True):
        told = collapse_rows([memory], [token_id], certainty_rows(row[None]), rule)[:-1, 0]
        expected = collapse_reference(row[None], torch.tensor([token_id]), state, slot, rule).statistics[0]
        torch.testing.assert_close(told.float(), expected, atol=1e-5, rtol=1e-4)


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
    told = certainty_rows(logits)
    expected = torch.stack(certainty(logits.double().float()))
    torch.testing.assert_close(told, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert told[:, 2:5].isnan().all() and told[:, 5].tolist() == [0.0, 1.0]
    for strided in (logits.T.contiguous().T, logits.repeat(1, 2)[:, :width], logits[:1].expand(8, -1)):
        torch.testing.assert_close(certainty_rows(strided)[:, 0], told[:, 0])
    half = logits.bfloat16()
    torch.testing.assert_close(certainty_rows(half), torch.stack(certainty(half)), atol=1e-5, rtol=1e-5, equal_nan=True)
