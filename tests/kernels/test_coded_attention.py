"""Attention over coded planes on a CPU: C++ against decode-then-attend in float64, and a row's bits in any company."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.coded_attention import coded_attention_reference
from sigma0.kernels.coded_row_attention import attend_coded_rows
from sigma0.kernels.plane_codec import PlaneCodec
from tests.kernels.coded_cases import SHAPES, Shape, case, poison, some
from tests.marks import needs_library

pytestmark = needs_library
SCALING = 0.3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def agrees(shape, seed, dtype=torch.float32, rows=9):
    """C++ against float64, with NaN in all that no row may read."""
    query, tails, coded, at = case(seed, shape, dtype, rows)
    wide = [tail.double() for tail in tails]
    expected = coded_attention_reference(query.double(), wide, coded, at, SCALING)
    poison(tails, coded, at)
    found = attend_coded_rows(query, tails, coded, at, SCALING)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert not found[at.cache_positions < 0].any()


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_attend_as_the_formula_says_and_read_nothing_else(name):
    agrees(SHAPES[name], 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    agrees(SHAPES["every width"], 2, dtype)


# One head width, since every other is compiled anew.
@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.integers(0, 2**16),
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([(1, 1), (2, 3), (1, 5)]),
    st.sampled_from([(16, None, 50), (32, 20, 100), (16, 48, 48), (48, 16, 160)]),
    st.booleans(),
    st.booleans(),
)
def test_any_rows(seed, bits, anchored, group, heads, places, starts, seen):
    (kv_heads, shared), (segment, page, room) = heads, places
    codec = PlaneCodec(tuple(bits), seed % len(bits) if anchored else None, group)
    agrees(Shape(codec, kv_heads, shared, 32, segment, page, room, starts, seen), seed, rows=6)


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_bound():
    query, tails, coded, at = case(5, SHAPES["residual"])
    whole = attend_coded_rows(query, tails, coded, at, SCALING)
    for row in range(len(query)):
        found = attend_coded_rows(query[row : row + 1], tails, coded, some(at, slice(row, row + 1)), SCALING)
        assert torch.equal(found, whole[row : row + 1])
    assert torch.equal(attend_coded_rows(query, tails, coded, replace(at, longest=at.longest + 2), SCALING), whole)


def test_tails_of_another_dtype_are_refused():
    query, tails, coded, at = case(1, SHAPES["residual"])
    with pytest.raises(ValueError, match=r"holds values in torch.float64"):
        attend_coded_rows(query, [tails[0], tails[1].double()], coded, at, SCALING)
