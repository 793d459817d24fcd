"""Bootstrap intervals against normal theory and slow resampling."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.estimates import bootstrap, ratio


def test_the_interval_of_a_mean_is_that_of_normal_theory():
    values = np.random.default_rng(1).normal(3.0, 2.0, 900)
    found = ratio(values, np.ones(900))
    half = 1.96 * values.std() / 30
    assert found.value == pytest.approx(values.mean())
    assert found.interval[0] == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.interval[1] == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_a_ratio_is_drawn_by_units():
    """Numerator and denominator of a unit go together, as they do in the slow form."""
    rng = np.random.default_rng(2)
    below = rng.integers(1, 30, 200)
    above = below * rng.random(200)
    fast = ratio(above, below, resamples=4000)
    slow = bootstrap(lambda drawn: float(above[drawn].sum() / below[drawn].sum()), 200, resamples=4000)
    assert fast.value == slow.value
    assert fast.interval == pytest.approx(slow.interval, abs=0.005)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_a_share_stays_between_0_and_1(pairs):
    above = [min(pair) for pair in pairs]
    below = [max(pair) for pair in pairs]
    found = ratio(above, below, resamples=50)
    if sum(below) == 0:
        assert found is None
    else:
        assert found.value == sum(above) / sum(below)
        assert 0 <= found.interval[0] <= found.interval[1] <= 1
        assert found == ratio(above, below, resamples=50), "not deterministic"


def test_no_units_are_refused():
    with pytest.raises(ValueError, match="0 units"):
        ratio([], [])
    with pytest.raises(ValueError, match="0 units"):
        bootstrap(lambda drawn: 0.0, 0)
    assert bootstrap(lambda drawn: None, 3) is None
