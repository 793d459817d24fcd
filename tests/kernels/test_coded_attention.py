"""Attention over coded planes on a CPU: C++ against decode-then-attend in float64, and a row's bits in any company."""

import pytest
import torch
from hypothesis import given, settings

from sigma0.kernels.coded_row_attention import attend_coded_rows
from tests.kernels.coded_cases import SCALING, SHAPES, assert_agrees, assert_rows_stand_alone, case, drawn_shapes
from tests.marks import needs_library, slow

pytestmark = needs_library
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


EVERY_SHAPE = [slow(name, torch.float32) for name in SHAPES]


@pytest.mark.parametrize("name, dtype", [*EVERY_SHAPE, *(("every width", dtype) for dtype in TOLERANCES)])
def test_rows_attend_as_the_formula_says_and_read_nothing_else(name, dtype):
    assert_agrees(attend_coded_rows, SHAPES[name], 2, TOLERANCES[dtype], dtype)


# One head width, since every other is compiled anew.
@pytest.mark.slow
@settings(max_examples=60)
@given(drawn_shapes([1, 2, 4, 8], [(32, 8), (32, 16), (32, 32)]))
def test_any_rows(drawn):
    assert_agrees(attend_coded_rows, drawn[1], drawn[0], TOLERANCES[torch.float32], rows=6)


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_bound():
    assert_rows_stand_alone(attend_coded_rows)


def test_tails_of_another_dtype_are_refused():
    query, tails, coded, at = case(1, SHAPES["residual"])
    with pytest.raises(ValueError, match=r"holds values in torch.float64"):
        attend_coded_rows(query, [tails[0], tails[1].double()], coded, at, SCALING)
