import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.strategyqa.values import Undecided, compare, value_of


@pytest.mark.parametrize("text, truth", [("Yes.", True), ("no, never", False), ("**True**", True), ("FALSE", False)])
def test_yes_and_no_are_truths(text, truth):
    found = value_of(text)
    assert (found.kind, found.truth, str(found)) == ("truth", truth, "yes" if truth else "no")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " \n\n",
            "...",
            "\x00\x07",
            "Yes or no",
            "no idea",
            "No information.",
            "Maybe.",
            "I don't know",
            "unknown",
            "Not sure",
        ),
        *(
            '{"steps": ["What',
            "<answer>",
            "x" * 61,
            "Well, that is a hard question to answer in only a few short words.",
        ),
    ],
)
def test_what_tells_nothing_is_no_truth_and_no_name_that_differs_from_others(text):
    found = value_of(text)
    assert found.kind == "open"
    for relation in ("=", "!=", "<"):
        for other in (found, value_of("swan"), value_of("Yes"), value_of("7")):
            assert isinstance(compare(found, relation, other), Undecided)
            assert isinstance(compare(other, relation, found), Undecided)


@pytest.mark.parametrize(
    "text, number, unit",
    [
        ("about 1,200 kg", 1_200_000.0, "g"),
        ("Four members", 4.0, ""),
        ("It has 8 legs.", 8.0, ""),
        ("in 1776", 1776.0, ""),
        ("July 4, 1776", 1776.0, ""),
        ("44 BC", -44.0, ""),
        ("1200 BCE", -1200.0, ""),
        ("$5bn", 5e9, "$"),
        ("2 km\nthat is 2000 m", 2000.0, "m"),
    ],
)
def test_the_only_number_of_an_answer_is_its_value(text, number, unit):
    found = value_of(text)
    assert (found.kind, found.number, found.unit) == ("number", number, unit)


@pytest.mark.parametrize(
    "text, name",
    [
        ("The Netherlands.", "netherlands"),
        (' "a  Red   fox" ', "red fox"),
        ("between 5 and 10 feet", "between 5 and 10 feet"),
        ("Nobody", "nobody"),
        ("3 of them on July 4, 1776", "3 of them on july 4, 1776"),
    ],
)
def test_what_is_no_truth_and_has_not_one_number_is_a_name(text, name):
    assert (value_of(text).kind, value_of(text).name) == ("name", name)


@pytest.mark.parametrize(
    "first, relation, second, expected",
    [
        ("6 feet", "=", "72 inches", True),
        ("6 feet", "<", "72 inches", False),
        ("1.5 metres", "<", "200 cm", True),
        ("4 legs", "<", "8", True),
        ("8", ">=", "8", True),
        ("8", "!=", "8", False),
        ("44 BC", "<", "10", True),
        ("Paris", "=", "paris.", True),
        ("Paris", "!=", "Rome", True),
        ("Yes", "=", "true", True),
    ],
)
def test_values_of_a_kind_are_compared(first, relation, second, expected):
    assert compare(value_of(first), relation, value_of(second)) is expected


@pytest.mark.parametrize(
    "first, relation, second, why",
    [
        ("5 kg", "<", "3 m", "different units"),
        ("5", "<", "3 m", "different units"),
        ("Paris", "<", "Rome", "no numbers"),
        ("Yes", "<", "No", "no numbers"),
        ("Yes", "=", "Paris", "a truth and a name"),
        ("5", "=", "Paris", "a number and a name"),
    ],
)
def test_what_cannot_be_compared_stays_open_and_says_why(first, relation, second, why):
    found = compare(value_of(first), relation, value_of(second))
    assert isinstance(found, Undecided)
    assert why in found.why


@given(st.text(max_size=300))
def test_any_text_has_a_value_that_equals_itself_or_is_open(text):
    found = value_of(text)
    if found.kind == "open":
        assert isinstance(compare(found, "=", found), Undecided)
        return
    assert compare(found, "=", found) is True
    assert compare(found, "!=", found) is False


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_numbers_compare_as_in_python(first, second):
    one, other = value_of(f"{first}"), value_of(f"{second}")
    assert compare(one, "<", other) is (first < second)
    assert compare(one, "<=", other) is (first <= second)
    assert compare(one, ">", other) is (first > second)
    assert compare(one, ">=", other) is (first >= second)
    assert compare(one, "=", other) is (first == second)
