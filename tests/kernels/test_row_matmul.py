"""Products of few rows on a CPU, against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.row_matmul import MAX_ROWS, multiply_rows
from tests.marks import needs_compiler

pytestmark = needs_compiler


def drawn(rows, width, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator), torch.randn(outputs, width, generator=generator)


@settings(max_examples=60)
@given(st.integers(0, MAX_ROWS + 2), st.integers(1, 200), st.integers(1, 60), st.integers(0, 10**6))
def test_rows_are_multiplied_as_the_formula_says(rows, width, outputs, seed):
    hidden, weight = drawn(rows, width, outputs, seed)
    with torch.no_grad():
        found = multiply_rows(hidden, weight)
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company():
    hidden, weight = drawn(MAX_ROWS, 160, 47, 0)
    whole = multiply_rows(hidden, weight)
    for first, last in ((0, 1), (3, 5), (1, 8), (5, 24)):
        assert torch.equal(multiply_rows(hidden[first:last], weight), whole[first:last])


@torch.no_grad()
def test_strided_rows_are_read_where_they_are():
    hidden, weight = drawn(6, 80, 12, 1)
    assert torch.equal(
        multiply_rows(hidden[::2, :40], weight[:, :40].contiguous()),
        multiply_rows(hidden[::2, :40].contiguous(), weight[:, :40].contiguous()),
    )
    # a matrix that is not contiguous is torch's
    torch.testing.assert_close(multiply_rows(hidden[:, ::2], weight[:, ::2]), F.linear(hidden[:, ::2], weight[:, ::2]))


@torch.no_grad()
def test_what_is_broken_stays_in_its_row():
    hidden, weight = drawn(5, 33, 9, 2)
    wanted = multiply_rows(hidden, weight)
    hidden[2, 7] = torch.nan
    found = multiply_rows(hidden, weight)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_other_dtypes_are_torchs(dtype):
    hidden, weight = (part.to(dtype) for part in drawn(3, 20, 8, 3))
    assert torch.equal(multiply_rows(hidden, weight), F.linear(hidden, weight))


def test_gradients_flow():
    hidden, weight = drawn(3, 20, 8, 4)
    multiply_rows(hidden.requires_grad_(), weight).sum().backward()
    torch.testing.assert_close(hidden.grad, weight.sum(0).expand(3, -1))
