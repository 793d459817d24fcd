"""Products, norms and choices of few rows on a CPU, against their formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sigma0.kernels import row_dot
from sigma0.kernels.collapse import leads_reference
from sigma0.kernels.row_choice import argmax_rows, margin_rows
from sigma0.kernels.row_norm import norm_rows
from tests.marks import needs_library

pytestmark = needs_library
DTYPES = (torch.float32, torch.bfloat16)
BROKEN = -1


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    for dtype in DTYPES:
        monkeypatch.setitem(row_dot.LEAST, dtype, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60)
@given(st.integers(0, 18), st.integers(1, 300), st.integers(1, 40), st.integers(0, 10**6))
def test_products_are_as_the_formula_says(dtype, rows, width, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(size, width, generator=generator).to(dtype) for size in (rows, columns))
    # nobody reads past the end of a row
    space = torch.full((columns + 1, width), torch.nan, dtype=dtype)
    space[:columns] = weight
    result = row_dot.row_dot(hidden, space[:columns])
    assert result.dtype is dtype
    exact = hidden.double() @ weight.double().T
    scale = hidden.double().abs() @ weight.double().abs().T
    error = 1e-6 if dtype is torch.float32 else 2.0**-8
    assert bool(((result.double() - exact).abs() <= error * scale + 1e-9).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(dtype, threads):
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 515).to(dtype), torch.randn(603, 515).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = row_dot.row_dot(hidden, weight)
        for rows in range(1, 16):
            assert torch.equal(row_dot.row_dot(hidden[:rows], weight), result[:rows])
            assert torch.equal(row_dot.row_dot(hidden[rows : rows + 1], weight), result[rows : rows + 1])
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_take_is_the_librarys(monkeypatch):
    monkeypatch.setattr(row_dot, "_product", lambda: pytest.fail("called"))
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    many = torch.randn(row_dot.MOST_ROWS[torch.float32] + 1, 8)
    strided = torch.randn(8, 5).T
    for rows, columns in ((hidden.half(), weight.half()), (many, weight), (hidden, strided)):
        assert torch.equal(row_dot.row_dot(rows, columns), F.linear(rows, columns))
    monkeypatch.setitem(row_dot.LEAST, torch.float32, 41)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(row_dot.row_dot(hidden, weight), F.linear(hidden, weight))


def test_texts_and_gradients_are_the_librarys():
    hidden, weight = torch.randn(2, 3, 20), torch.randn(8, 20)
    assert torch.equal(row_dot.row_dot(hidden, weight), F.linear(hidden, weight))
    rows = hidden[0].requires_grad_()
    row_dot.row_dot(rows, weight).sum().backward()
    torch.testing.assert_close(rows.grad, weight.sum(0).expand(3, -1))


def test_what_is_broken_stays_in_its_row():
    hidden, weight = torch.randn(5, 33), torch.randn(9, 33)
    wanted = row_dot.row_dot(hidden, weight)
    hidden[2, 7] = torch.nan
    result = row_dot.row_dot(hidden, weight)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


@pytest.mark.parametrize("width, dtype", [(20, torch.bfloat16), (16, torch.float32)])
def test_weights_of_another_dtype_or_width_are_refused(width, dtype):
    with pytest.raises(RuntimeError):
        row_dot.row_dot(torch.randn(2, 20), torch.randn(8, width).to(dtype))


def test_the_operator_itself_takes_what_it_cannot_read_to_the_library():
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    strided = torch.randn(8, 5).T
    assert torch.equal(torch.ops.sigma0.row_dot(hidden, strided, 16), hidden @ strided.T)
    wide = torch.ops.sigma0.row_dot(hidden.double(), weight.double(), 16)
    assert torch.equal(wide, hidden.double() @ weight.double().T)


def normed(hidden, weight, epsilon, residual):
    wide = hidden.double()
    result = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return result if residual is None else residual.double() + result


@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(1, 300), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_rows_are_normed_as_the_formula_says(rows, width, added, strided, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 2 * width, generator=generator)[:, :: 2 if strided else 1][:, :width]
    weight = torch.randn(width, generator=generator)
    residual = torch.randn(rows, width, generator=generator) if added else None
    result = norm_rows(hidden, weight, 1e-5, residual)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), normed(hidden, weight, 1e-5, residual), atol=1e-6, rtol=1e-5)


def test_a_norm_of_zeros_is_zero_and_what_is_broken_stays_in_its_row():
    hidden = torch.zeros(3, 40)
    hidden[1, 7] = torch.nan
    result = norm_rows(hidden, torch.ones(40), 1e-6)
    assert not result[[0, 2]].any()
    assert result[1].isnan().all()


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
def test_logits_that_are_broken_are_told(bad):
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
