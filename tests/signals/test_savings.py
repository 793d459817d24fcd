import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.signals.savings import Savings, savings
from tests.reference import finish_rows


def test_by_hand():
    """Two sequences, T = 4: depths after the first are 2, 1, 4 and 3."""
    saved = savings([[4, 2, 1, 4], [1, 3]], passes=7, rows=13, total_loops=4)
    assert saved.mean_depth == pytest.approx(10 / 4)
    assert saved.depth_saved == pytest.approx(1 - 10 / 16)
    assert saved.passes_saved == pytest.approx(1 - 7 / 12)
    assert saved.rows_saved == pytest.approx(1 - 13 / 16)


@pytest.mark.parametrize("depths", [[], [[]], [[3]], [[3], [1], []]])
def test_nothing_to_tell_for_single_tokens(depths):
    assert savings(depths, passes=0, rows=0, total_loops=4) == Savings(None, None, None, None)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=30))
def test_identities_of_one_sequence(depths):
    """`finish`: passes_saved is depth_saved; `drop`: rows_saved is passes_saved, and `finish` saves no more rows."""
    spent = sum(depths[1:])
    finish = savings([depths], passes=spent, rows=finish_rows(depths, 6), total_loops=6)
    drop = savings([depths], passes=spent, rows=spent, total_loops=6)
    assert finish.passes_saved == pytest.approx(finish.depth_saved)
    assert drop.rows_saved == pytest.approx(drop.passes_saved)
    assert finish.rows_saved <= drop.rows_saved + 1e-9
    assert -1e-9 <= finish.rows_saved < 1
