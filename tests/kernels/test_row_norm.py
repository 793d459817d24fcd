"""The norm of rows on a CPU, against its formula in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.row_norm import norm_rows
from tests.marks import needs_library

pytestmark = needs_library


def formula(hidden, weight, epsilon, residual):
    wide = hidden.double()
    normed = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return normed if residual is None else residual.double() + normed


@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(1, 300), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_rows_are_normed_as_the_formula_says(rows, width, added, strided, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 2 * width, generator=generator)[:, :: 2 if strided else 1][:, :width]
    weight = torch.randn(width, generator=generator)
    residual = torch.randn(rows, width, generator=generator) if added else None
    result = norm_rows(hidden, weight, 1e-5, residual)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), formula(hidden, weight, 1e-5, residual), atol=1e-6, rtol=1e-5)


def test_zeros_stay_zeros_and_what_is_broken_stays_in_its_row():
    hidden = torch.zeros(3, 40)
    hidden[1, 7] = torch.nan
    result = norm_rows(hidden, torch.ones(40), 1e-6)
    assert not result[[0, 2]].any()
    assert result[1].isnan().all()
