"""Where a number, its sign, its unit and what it counts begin and end, and when two numbers are the same."""

from dataclasses import replace

import pytest

from sigma0.signals.grounding.quantities import Date, Number, same_number, take_dates, take_numbers
from tests.marks import named

# texts, and the values that are read of them
ROWS_OF_WORDS = """
one hundred of them: 100; one of them:; one km: 1000; two hundred hundred: 200, 100; two thousand hundred: 2000, 100
two hundred thousand: 200000; two thousand three hundred five: 2305; two and hundred: 2, 100; half a dozen: 6
two hundred and thousand: 200, 1000; two dozen hundred: 24, 100; two dozen thousand: 24, 1000; two dozen five: 24, 5
half a dozen two: 6, 2; a million two: 1000002; twenty one: 21; Twenty-One: 21; twenty and two: 20, 2
nineteen two: 19, 2; twenty ten: 20, 10; twenty zero: 20, 0; thirty-nine: 39
two hundred and fifty thousand three hundred and five: 250305; -3 of 7-3, 7 - 3 and $-3: -3, 7, 3, 7, 3, -3
1,1111,111 and £5m: 1, 1111, 111, 5e6; in 1961 km: 1961000
"""
RANGES = """
5 to 10 kg: 5000, 10000; 5 and 10 kg: 5000, 10000; 5 to 10 to 15 kg: 5000, 10000, 15000; 5 to 10 to 15: 5, 10, 15
5 km to 10 kg: 5000, 10000; 5 cats and 10 kg: 5, 10000; 5 then 10 kg: 5, 10000; 5 kg to 10: 5000, 10
1905-06: 1905, 1906; 1990\u201395: 1990, 1995; 1990 or 95: 1990, 95; 1990 to 95: 1990, 95; 1990-5: 1990, 5
990-95: 990, 95; 1990-955: 1990, 955
"""
COMPOUNDS = """
1 hour 30 minutes: 5400; 1 hour and 30 minutes: 5400; 1 hour 2 minutes 3 seconds: 3723; 1 hour 0 minutes: 3600
1 hour 59 minutes: 7140; 1 hour 60 minutes: 3600, 3600; 1 hour, 30 minutes: 3600, 1800; 5 0.5: 5, 0.5
1 hour minus 5 minutes: 3600, -300; 30 minutes 1 hour: 1800, 3600; 1 hour 5 cats: 3600, 5; 1 km 30 minutes: 1000, 1800
"""
WRITTEN = """
two hundred and five cats: two hundred and five; two three cats: two, three; minus 5 cats: minus 5; -5 cats: -5
it is -$5: -$5; it is $-5: $-5; 1 hour 30 minutes: 1 hour 30
"""
COUNTED = """
5 cats: cat; 5 fat cats: fat, cat; 5 very-fat grey cats:; 5 fat grey cats sleep: fat, grey, cat; 5 cats of Rome: cat
5 cats of dogs: cat; 5 newly built houses: built, hous; 5 Red cars: car; 5 Al cans: can; 5 X rays: x, ray; 5:
the 21st century: century; the 2nd km: km; in 1961 scientists:; 1961 scientists: scientist; in 961 scientists: scientist
"""


def read(text):
    return take_numbers(text)[0]


def cases(table, mark=":"):
    """Each text of a table with what is expected of it, after the mark."""
    for case in table.strip().replace("\n", "; ").split("; "):
        text, expected = case.rsplit(mark, 1)
        yield text, [item for item in expected.strip().split(", ") if item]


@pytest.mark.parametrize("table", [ROWS_OF_WORDS, RANGES, COMPOUNDS], ids=["words", "ranges", "compounds"])
def test_a_number_ends_where_another_begins_and_shares_what_stands_behind(table):
    for text, expected in cases(table):
        with named(text):
            assert [number.value for number in read(text)] == list(map(float, expected))


def test_a_number_is_told_as_written():
    for text, written in cases(WRITTEN):
        with named(text):
            assert [number.text for number in read(text)] == written


@pytest.mark.parametrize("spaces, about", [(1, True), (11, True), (12, False)])
def test_a_word_before_it_is_looked_for_in_24_characters(spaces, about):
    assert read(f"it is approximately{' ' * spaces}5")[0].about is about


@pytest.mark.parametrize(
    "text, amount, unit, step",
    [
        ("$5", 5, "$", 0),
        ("€5", 5, "EUR", 0),
        ("£ 5", 5, "GBP", 0),
        ("¥5", 5, "JPY", 0),
        ("5m", 5, "m", 0),
        ("5M", 5, "m", 0),
        ("$5m", 5e6, "$", 1e6),
        ("5m euros", 5e6, "EUR", 1e6),
        ("5bn", 5e9, "", 1e9),
        ("5K", 5000, "", 1000),
        ("5.25 Million km", 5.25e6, "m", 1e4),
        ("1.5e-3", 1.5e-3, "", 1e-4),
        ("1.50", 1.5, "", 0.01),
        (".5", 0.5, "", 0.1),
        ("5 dozen", 60, "", 12),
        ("1,234", 1234, "", 0),
        ("1234", 1234, "", 0),
    ],
)
def test_scales_and_steps_of_digits(text, amount, unit, step):
    number = read(f"it is {text} there")[0]
    assert (number.amount, number.unit, number.nouns) == (pytest.approx(amount), unit, ())
    assert number.step == pytest.approx(step, abs=0)


def test_what_is_counted():
    for text, nouns in cases(COUNTED):
        with named(text):
            (number,) = read(text)
            assert number.nouns == tuple(nouns) and number.unit == ""


def test_a_compound_is_as_exact_as_its_last_part_and_the_rest_lacks_numbers():
    about = read("about 1 hour 30.5 minutes")[0]
    assert about.about and about.amount == pytest.approx(90.5) and about.step == pytest.approx(0.1)
    assert (about.unit, about.factor) == ("s", 60)
    assert not read("1 hour 30 minutes")[0].about
    assert take_numbers("I ran 5 km in two hours there")[1] == "I ran  ;  in  ;  there"
    assert take_numbers("no number") == ((), "no number")


@pytest.mark.parametrize(
    "text, date",
    [
        ("2024-03-05", (2024, 3, 5)),
        ("2024-12-05", (2024, 12, 5)),
        ("05.03.2024", (2024, 3, 5)),
        ("March 5, 2024", (2024, 3, 5)),
        ("5th of March 2024", (2024, 3, 5)),
        ("Mar. 5th", (None, 3, 5)),
        ("sept 2024", (2024, 9, None)),
        ("sep 1", (None, 9, 1)),
        ("1 january", (None, 1, 1)),
        ("December 31", (None, 12, 31)),
    ],
)
def test_dates(text, date):
    assert take_dates(f"on {text}; then") == ((Date(*date, text),), "on  ; ; then")
    assert take_dates("on 2024-00-05; then")[0] == take_dates("on 2024-13-05; then")[0] == ()


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
