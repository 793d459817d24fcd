"""Units, scales and number words against tables of others."""

import pytest

from sigma0.signals.grounding.claims import checkable
from sigma0.signals.grounding.quantities import _UNITS, is_measure, unit_of

constants = pytest.importorskip("scipy.constants")

GRAM, KILO, MEGA, GIGA, TERA = 1e-3, constants.kilo, constants.mega, constants.giga, constants.tera
SPEED = constants.kmh
# By the name of a unit, its spellings and what each is of the base.
EXPECTED = {
    "%": dict.fromkeys(("%", "percent", "per cent", "pct"), 1),
    "m": {
        **dict.fromkeys(("m", "meter", "metre"), 1),
        **dict.fromkeys(("km", "kilometer", "kilometre"), KILO),
        **dict.fromkeys(("cm", "centimeter", "centimetre"), constants.centi),
        "mm": constants.milli,
        **dict.fromkeys(("mile", "mi"), constants.mile),
        **dict.fromkeys(("foot", "feet", "ft"), constants.foot),
        # "inches" without its s
        **dict.fromkeys(("inch", "inche"), constants.inch),
        "yard": constants.yard,
    },
    "g": {
        **dict.fromkeys(("g", "gram"), 1),
        **dict.fromkeys(("kg", "kilogram", "kilo"), KILO),
        "mg": constants.milli,
        **dict.fromkeys(("tonne", "ton"), constants.metric_ton / GRAM),
        **dict.fromkeys(("pound", "lb"), constants.pound / GRAM),
        **dict.fromkeys(("ounce", "oz"), constants.oz / GRAM),
    },
    "s": {
        **dict.fromkeys(("second", "sec"), 1),
        **dict.fromkeys(("minute", "min"), constants.minute),
        **dict.fromkeys(("hour", "hr"), constants.hour),
        "day": constants.day,
        "week": constants.week,
    },
    "year": {
        **dict.fromkeys(("year", "yr"), 1),
        "month": 1 / 12,
        "decade": 10,
        **dict.fromkeys(("century", "centurie"), 100),
    },
    "am": dict.fromkeys(("am", "a.m"), 1),
    "pm": dict.fromkeys(("pm", "p.m"), 1),
    "$": dict.fromkeys(("$", "dollar", "usd"), 1),
    "EUR": dict.fromkeys(("€", "euro", "eur"), 1),
    "GBP": dict.fromkeys(("£", "gbp"), 1),
    "JPY": dict.fromkeys(("¥", "yen", "jpy"), 1),
    "degree": dict.fromkeys(("°", "degree"), 1),
    "celsius": dict.fromkeys(("c", "°c", "degree celsius", "celsius"), 1),
    "fahrenheit": dict.fromkeys(("f", "°f", "degree fahrenheit", "fahrenheit"), 1),
    "l": {**dict.fromkeys(("liter", "litre", "l"), 1), "ml": constants.milli},
    "m/s": {"m/s": 1, **dict.fromkeys(("km/h", "kph"), SPEED), "mph": constants.mph},
    "watt": {
        **dict.fromkeys(("watt", "w"), 1), **dict.fromkeys(("kw", "kilowatt"), KILO),
        **dict.fromkeys(("mw", "megawatt"), MEGA),
    },
    "volt": {**dict.fromkeys(("volt", "v"), 1), **dict.fromkeys(("kv", "kilovolt"), KILO)},
    "byte": {
        "byte": 1, **dict.fromkeys(("kb", "kilobyte"), KILO), **dict.fromkeys(("mb", "megabyte"), MEGA),
        **dict.fromkeys(("gb", "gigabyte"), GIGA), **dict.fromkeys(("tb", "terabyte"), TERA),
    },
    "hz": {**dict.fromkeys(("hz", "hertz"), 1), "khz": KILO, "mhz": MEGA, "ghz": GIGA},
}  # fmt: skip
WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18,
    "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80,
    "ninety": 90, "ninety-nine": 99, "two hundred": 200, "three thousand": 3e3, "four million": 4e6,
    "five billion": 5e9, "six trillion": 6e12, "seven dozen": 84, "zero": 0, "a hundred": 100, "half a million": 5e5,
    "one hundred and one": 101, "two thousand and twenty": 2020, "three million four thousand five": 3004005,
}  # fmt: skip


def numbers(text):
    return [number.value for number in checkable(text).numbers]


def test_units_are_those_of_others():
    known = {spelling: (name, factor) for name, each in EXPECTED.items() for spelling, factor in each.items()}
    assert set(known) == set(_UNITS)
    for spelling, (name, factor) in known.items():
        assert unit_of(spelling) == (name, pytest.approx(factor, rel=1e-7)), spelling


def test_squares_and_plurals_of_units():
    assert unit_of("square km") == ("m^2", pytest.approx(1e6)) and unit_of("sq. feet")[0] == "m^2"
    assert unit_of("cubic inches") == ("m^3", pytest.approx(constants.inch**3))
    assert unit_of("square parsnip") == ("parsnip^2", 1.0)
    assert unit_of("miles") == unit_of("mile") and unit_of("degrees Celsius") == ("celsius", 1.0)
    assert unit_of("parsnip") is None


@pytest.mark.parametrize("text, value", WORDS.items())
def test_number_words(text, value):
    assert numbers(f"They had {text} of them") == [value]


@pytest.mark.parametrize(
    "text, value",
    [("3k", 3e3), ("$4m", 4e6), ("4m dollars", 4e6), ("5bn", 5e9), ("6b", 6e9), ("7 hundred", 700), ("8 dozen", 96)],
)
def test_short_scales(text, value):
    assert numbers(f"They had {text} of them") == [value]


@pytest.mark.parametrize(
    "word, is_one",
    [
        ("4th", True),
        ("1st", True),
        ("2nd", True),
        ("3rd", True),
        ("5bn", True),
        ("600MB", True),
        ("th", False),
        ("5parsnips", False),
        ("4", False),
    ],
)
def test_measures(word, is_one):
    assert is_measure(word) == is_one


@pytest.mark.parametrize(
    "text, step",
    [
        ("12", 0),
        ("12.5", 0.1),
        ("0.125", 0.001),
        ("3 million", 1e6),
        ("3.5 million", 1e5),
        ("2e3", 1e3),
        ("2.5e3", 100),
    ],
)
def test_a_number_is_as_exact_as_it_was_written(text, step):
    assert checkable(f"They had {text} of them").numbers[0].step == pytest.approx(step)
