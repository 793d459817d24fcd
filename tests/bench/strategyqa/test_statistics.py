from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from sigma0.bench.strategyqa.statistics import holm, majority, mcnemar
from sigma0.calibrate.bootstrap import share

BOOLS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=400)


def pairs(both, only_first, only_second, neither):
    first = [True] * (both + only_first) + [False] * (only_second + neither)
    return first, [True] * both + [False] * only_first + [True] * only_second + [False] * neither


def test_only_items_on_which_two_levels_differ_count():
    assert mcnemar(*pairs(50, 1, 5, 40)) == 14 / 64
    assert mcnemar(*pairs(10, 0, 0, 10)) == 1.0
    assert mcnemar(*pairs(10, 4, 4, 10)) == mcnemar(*pairs(0, 3, 3, 0)) == 1.0
    for first, second in (([], []), ([True], [True, False])):
        with pytest.raises(ValueError, match="the same items twice"):
            mcnemar(first, second)


@given(BOOLS)
def test_mcnemar_is_the_two_sided_binomial_test_of_scipy(both):
    result = mcnemar([first for first, _ in both], [second for _, second in both])
    first, second = (sum(one and not other for one, other in pairs) for pairs in (both, [pair[::-1] for pair in both]))
    expected = binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert isclose(result, expected, rel_tol=1e-9)


@pytest.mark.parametrize("only_first, only_second", [(900, 1100), (0, 2290), (1145, 1144)])
def test_mcnemar_holds_for_as_many_items_as_there_are(only_first, only_second):
    result = mcnemar(*pairs(3, only_first, only_second, 5))
    assert isclose(result, binomtest(only_first, only_first + only_second, 0.5).pvalue, rel_tol=1e-6)


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    result = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.005})
    assert list(result) == ["a", "b", "c", "d"]
    assert [round(value, 10) for value in result.values()] == [0.06, 0.03, 0.06, 0.02]
    assert holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


def test_the_majority_rate_is_that_of_the_commoner_label():
    result = majority([True] * 3 + [False] * 7)
    assert result == majority([True] * 7 + [False] * 3) == share(7, 10) and result.value == 0.7
    with pytest.raises(ValueError, match="no share"):
        majority([])
