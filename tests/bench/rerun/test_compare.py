"""What counts as a difference between two reports."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.rerun.compare import OF_THE_RUN, TOLERANCE, differences

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-1e3, 1e3) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_a_report_does_not_differ_from_itself(value):
    assert list(differences(value, copy.deepcopy(value))) == []


@given(PLAIN, PLAIN)
def test_differences_are_the_same_both_ways(one, two):
    assert len(list(differences(one, two))) == len(list(differences(two, one)))


def test_each_kind_of_difference_is_told_with_its_place():
    before = {"a": [1, {"b": "x"}], "c": 0.5, "d": True, "e": None, "gone": 1}
    now = {"a": [1, {"b": "y"}, 3], "c": 0.6, "d": 1, "e": 0, "new": 2}
    assert list(differences(before, now)) == [
        ".a: 2 entries, now 3", ".a[1].b: 'x', now 'y'", ".c: 0.5, now 0.6", ".d: True, now 1", ".e: None, now 0",
        ".gone: only before", ".new: only now",
    ]  # fmt: skip


def test_rounding_is_no_difference_and_one_answer_of_ten_thousand_in_a_count_is():
    assert list(differences(1.0, 1.0 + TOLERANCE / 2)) == []
    assert list(differences([12345], [12345 * (1 + TOLERANCE / 2)])) == []
    assert len(list(differences([0.5], [0.5 + 2 * TOLERANCE]))) == 1
    assert len(list(differences([1000], [1001]))) == 1


def test_what_a_run_says_of_itself_is_left_out():
    assert list(differences(dict.fromkeys(OF_THE_RUN, 1), {})) == []


def test_long_values_are_told_in_part():
    (told,) = differences("a" * 500, "b" * 500)
    assert len(told) < 120
