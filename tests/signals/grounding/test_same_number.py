"""When two numbers are the same: exact limits of rounding, of tolerance and of units."""

from dataclasses import replace

import pytest

from sigma0.signals.grounding.quantities import Number, same_number

BARE = Number(5.0, text="5")


def test_a_plain_number_forgets_how_it_was_written_and_a_year_is_a_bare_one_of_four_digits():
    written = Number(3.0, "m", 1000.0, 0.5, True, ("cat",), "3.0")
    assert written.plain == Number(3.0, "m", 1000.0, nouns=("cat",)) and written.value == 3000.0
    assert Number(1961.0, text="1961").may_be_year
    assert not any(Number(float(text), text=text).may_be_year for text in ("961", "12345", "12.5", "-196"))
    assert not Number(1961.0, unit="m", text="1961").may_be_year
    assert not Number(1961.0, nouns=("cat",), text="1961").may_be_year


@pytest.mark.parametrize(
    "claimed, other, same",
    [
        (Number(0.0), Number(0.0), True),
        # half of a step, and not more
        (Number(0.0, step=0.5), Number(0.25), True),
        (Number(0.0, step=0.5), Number(-0.25), True),
        (Number(0.0, step=0.5), Number(0.2501), False),
        (Number(5.0), Number(5.5), False),
        # a billionth is what floats may lose
        (Number(1e9), Number(1e9 + 1), True),
        (Number(1e9), Number(1e9 + 2), False),
        (Number(1e9, about=True), Number(1e9 + 1), True),
        # the step counts in the unit that it was written in
        (Number(5.0, "m", 1000.0, 1.0), Number(5400.0, "m"), True),
        (Number(5.0, "m", 1000.0, 1.0), Number(5600.0, "m"), False),
        # of a bare number the other's unit is not known
        (Number(5.0, step=1.0), Number(5.4, "m", 1000.0), True),
        (Number(5.0, "m", 1000.0, 1.0), Number(5.6), False),
        (Number(5.0, "m", 1000.0, 1.0), Number(5.4), True),
    ],
)
def test_within_half_a_step(claimed, other, same):
    assert same_number(claimed, other, 0.0) is same


@pytest.mark.parametrize("unit", ["%", "$", "EUR", "GBP", "JPY"])
def test_a_bare_number_has_no_sign_of_money_or_shares_unless_it_stands_alone(unit):
    marked = replace(BARE, unit=unit)
    assert not same_number(marked, BARE, 0.0) and not same_number(BARE, marked, 0.0)
    assert same_number(marked, BARE, 0.0, lone=True) and same_number(BARE, marked, 0.0, lone=True)
    assert same_number(marked, marked, 0.0) and same_number(BARE, BARE, 0.0)


@pytest.mark.parametrize(
    "first, second, same",
    [
        (("cat",), ("cat",), True),
        (("cat",), ("big", "cat"), True),
        (("big", "cat"), ("cat",), True),
        (("cat", "food"), ("big", "cat"), True),
        (("big", "cat"), ("cat", "food"), True),
        (("big", "cat"), ("small", "cat"), False),
        (("cat",), ("dog",), False),
    ],
)
def test_one_begins_with_what_the_other_counts(first, second, same):
    assert same_number(Number(5.0, nouns=first), Number(5.0, nouns=second), 0.0) is same


def test_units_are_the_same_or_degrees_and_count_nothing_else():
    for same, pairs in (
        (True, (("m", "m"), ("degree", "celsius"), ("fahrenheit", "degree"))),
        (False, (("m", "g"), ("fahrenheit", "celsius"), ("degree", "m"), ("%", "$"))),
    ):
        for first, second in pairs:
            assert same_number(Number(5.0, first), Number(5.0, second), 0.0) is same, (first, second)
    cats, metres = Number(5.0, nouns=("cat",)), Number(5.0, "m")
    assert not same_number(cats, metres, 0.0) and not same_number(metres, cats, 0.0)
