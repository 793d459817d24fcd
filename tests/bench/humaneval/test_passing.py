from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.humaneval.passing import estimates, pass_at_k


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passed_sample(n, passed, k):
    passed, k = min(passed, n), min(k, n)
    subsets = list(combinations(range(n), k))
    share = sum(min(subset) < passed for subset in subsets) / len(subsets)
    assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_a_share_of_very_many_samples():
    assert pass_at_k(100_000, 25_000, 1) == pytest.approx(0.25)
    assert 0 < pass_at_k(100_000, 1, 100) < pass_at_k(100_000, 2, 100) < pass_at_k(100_000, 99_999, 100) == 1


@pytest.mark.parametrize(("n", "passed", "k"), [(1, 2, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_more_than_there_is_cannot_be_asked(n, passed, k):
    with pytest.raises(ValueError, match="0 <= passed <= n"):
        pass_at_k(n, passed, k)


def test_means_are_over_problems_for_each_k_that_the_samples_allow():
    found = estimates(10, [10, 0, 5, 0])
    assert sorted(found) == [1, 10]
    assert found[1].value == pytest.approx(0.375) and found[10].value == pytest.approx(0.5)
    for estimate in found.values():
        assert 0 <= estimate.interval[0] < estimate.value < estimate.interval[1] <= 1
    assert sorted(estimates(1, [1])) == [1] and sorted(estimates(100, [1])) == [1, 10, 100]
