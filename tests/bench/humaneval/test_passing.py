from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.humaneval.passing import estimates, pass_at_k


@st.composite
def draws(draw, most=9):
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(draws())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_passed_sample(drawn):
    n, passed, k = drawn
    subsets = list(combinations(range(n), k))
    share = sum(min(subset) < passed for subset in subsets) / len(subsets)
    assert pass_at_k(n, passed, k) == pytest.approx(share, abs=1e-12)


@given(draws(most=100_000))
def test_pass_at_k_is_a_share_however_many_samples_there_are(drawn):
    n, passed, k = drawn
    found = pass_at_k(n, passed, k)
    assert 0.0 <= found <= 1.0
    assert (found == 0.0) == (passed == 0)
    if passed < n:
        assert pass_at_k(n, passed + 1, k) >= found
    if k == 1:
        assert found == pytest.approx(passed / n)


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
