"""Units, scales and number words against tables of others."""

import pytest

from sigma0.signals.grounding.claims import checkable
from sigma0.signals.grounding.quantities import _UNITS, is_measure, unit_of
from tests.marks import named

constants = pytest.importorskip("scipy.constants")

KILO, MEGA, GIGA, TERA = constants.kilo, constants.mega, constants.giga, constants.tera
# By the name of a unit, what its spellings are of the base; "inches" is read without its s.
EXPECTED = {
    "%": {"%, percent, per cent, pct": 1},
    "m": {"m, meter, metre": 1, "km, kilometer, kilometre": KILO, "cm, centimeter, centimetre": constants.centi}
    | {"mm": constants.milli, "mile, mi": constants.mile, "foot, feet, ft": constants.foot}
    | {"inch, inche": constants.inch, "yard": constants.yard},
    "g": {"g, gram": 1, "kg, kilogram, kilo": KILO, "mg": constants.milli, "tonne, ton": constants.metric_ton * KILO}
    | {"pound, lb": constants.pound * KILO, "ounce, oz": constants.oz * KILO},
    "s": {"second, sec": 1, "minute, min": constants.minute, "hour, hr": constants.hour}
    | {"day": constants.day, "week": constants.week},
    "year": {"year, yr": 1, "month": 1 / 12, "decade": 10, "century, centurie": 100},
    "am": {"am, a.m": 1},
    "pm": {"pm, p.m": 1},
    "$": {"$, dollar, usd": 1},
    "EUR": {"€, euro, eur": 1},
    "GBP": {"£, gbp": 1},
    "JPY": {"¥, yen, jpy": 1},
    "degree": {"°, degree": 1},
    "celsius": {"c, °c, degree celsius, celsius": 1},
    "fahrenheit": {"f, °f, degree fahrenheit, fahrenheit": 1},
    "l": {"liter, litre, l": 1, "ml": constants.milli},
    "m/s": {"m/s": 1, "km/h, kph": constants.kmh, "mph": constants.mph},
    "watt": {"watt, w": 1, "kw, kilowatt": KILO, "mw, megawatt": MEGA},
    "volt": {"volt, v": 1, "kv, kilovolt": KILO},
    "byte": {"byte": 1, "kb, kilobyte": KILO, "mb, megabyte": MEGA, "gb, gigabyte": GIGA, "tb, terabyte": TERA},
    "hz": {"hz, hertz": 1, "khz": KILO, "mhz": MEGA, "ghz": GIGA},
}
WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18,
    "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80,
    "ninety": 90, "ninety-nine": 99, "two hundred": 200, "three thousand": 3e3, "four million": 4e6,
    "five billion": 5e9, "six trillion": 6e12, "seven dozen": 84, "zero": 0, "a hundred": 100, "half a million": 5e5,
    "one hundred and one": 101, "two thousand and twenty": 2020, "three million four thousand five": 3004005,
}  # fmt: skip


def test_units_are_those_of_others():
    known = {
        spelling: (name, factor)
        for name, item in EXPECTED.items()
        for spellings, factor in item.items()
        for spelling in spellings.split(", ")
    }
    assert set(known) == set(_UNITS)
    for spelling, (name, factor) in known.items():
        assert unit_of(spelling) == (name, pytest.approx(factor, rel=1e-7)), spelling


def test_squares_and_plurals_of_units():
    assert unit_of("square km") == ("m^2", pytest.approx(1e6)) and unit_of("sq. feet")[0] == "m^2"
    assert unit_of("cubic inches") == ("m^3", pytest.approx(constants.inch**3))
    assert unit_of("square parsnip") == ("parsnip^2", 1.0)
    assert unit_of("miles") == unit_of("mile") and unit_of("degrees Celsius") == ("celsius", 1.0)
    assert unit_of("parsnip") is None


def test_number_words():
    for text, value in WORDS.items():
        with named(text):
            assert [number.value for number in checkable(f"They had {text} of them").numbers] == [value]


def test_a_number_with_a_unit_or_an_ordinal_is_a_measure():
    assert all(map(is_measure, ("4th", "1st", "2nd", "3rd", "5bn", "600MB")))
    assert not any(map(is_measure, ("th", "5parsnips", "4")))
