"""What is decided by rows of logits on a CPU, against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.collapse import leads_reference
from sigma0.kernels.row_choice import argmax_rows, margin_rows
from tests.marks import needs_library

pytestmark = needs_library
BROKEN = -1


def drawn(rows, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(rows, vocabulary, generator=generator), torch.rand(rows, generator=generator)


@settings(max_examples=80)
@given(st.integers(0, 9), st.integers(2, 300), st.booleans(), st.integers(0, 10**6))
def test_rows_lead_as_the_formula_says(rows, vocabulary, strided, seed):
    logits, theta = drawn(rows, 2 * vocabulary, seed)
    logits = logits[:, :vocabulary] if strided else logits[:, :vocabulary].contiguous()
    best = torch.softmax(logits.double(), -1).topk(2, -1).values
    margin = best[:, 0] - best[:, 1]
    apart = (margin - theta).abs() > 1e-5
    assert torch.equal(margin_rows(logits, theta)[apart], (margin >= theta)[apart])
    assert torch.equal(margin_rows(logits, 0.5)[apart], leads_reference(logits, 0.5)[apart])
    assert torch.equal(argmax_rows(logits, BROKEN), logits.argmax(-1))


def test_ties_go_to_the_first_and_lead_by_nothing():
    logits = torch.zeros(2, 40)
    logits[1, [5, 30]] = 3.0
    assert argmax_rows(logits, BROKEN).tolist() == [0, 5]
    assert margin_rows(logits, torch.tensor([0.0, 0.0])).tolist() == [True, True]
    assert margin_rows(logits, torch.tensor([1e-6, 1e-6])).tolist() == [False, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_is_told(bad):
    logits, theta = drawn(3, 50, 1)
    logits[1] = bad if bad == -torch.inf else logits[1]
    logits[1, 9] = bad
    assert argmax_rows(logits, BROKEN).tolist() == [int(logits[0].argmax()), BROKEN, int(logits[2].argmax())]
    assert torch.equal(margin_rows(logits, theta), leads_reference(logits, theta))


def test_some_ids_may_be_forbidden():
    logits, theta = drawn(4, 60, 2)
    logits[:, ::3] = -torch.inf
    assert torch.equal(argmax_rows(logits, BROKEN), logits.argmax(-1))
    assert torch.equal(margin_rows(logits, theta), leads_reference(logits, theta))
    logits[:, 2:] = -torch.inf
    logits[:, 0] = -torch.inf
    assert margin_rows(logits, 1.0).all()
