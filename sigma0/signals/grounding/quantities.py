"""Numbers and dates in a text, in words or digits, and whether two of them are equal within their rounding."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from sigma0.signals.grounding.words import is_stop, listed, stem

_MONTHS = {
    name: number
    for number, names in enumerate(
        listed(
            """
            january/jan february/feb march/mar april/apr may june/jun july/jul august/aug september/sep/sept
            october/oct november/nov december/dec
            """
        ),
        start=1,
    )
    for name in names.split("/")
}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DATES = (
    re.compile(r"\b(?P<y>\d{4})-(?P<m>\d{2})-(?P<d>\d{2})\b"),
    re.compile(r"(?<![\w.])(?P<d>\d{1,2})\.(?P<m>\d{1,2})\.(?P<y>\d{4})(?!\w|\.\d)"),
    re.compile(rf"\b(?P<mon>{_MONTH})\.?\s+(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<y>\d{{4}}))?\b", re.IGNORECASE),
    re.compile(
        rf"\b(?P<d>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<mon>{_MONTH})\.?(?:,?\s+(?P<y>\d{{4}}))?\b", re.IGNORECASE
    ),
    re.compile(rf"\b(?P<mon>{_MONTH})\.?,?\s+(?P<y>\d{{4}})\b", re.IGNORECASE),
)  # fmt: skip
_MAY_HOLD_DATES = re.compile(rf"\d{{4}}-\d|\d\.\d|\b(?:{_MONTH})\b", re.IGNORECASE)
_SMALL = {
    word: value
    for value, word in enumerate(
        listed(
            """
            zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
            seventeen eighteen nineteen
            """
        )
    )
} | {word: 10 * value for value, word in enumerate(listed("twenty thirty forty fifty sixty seventy eighty ninety"), 2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GROUPS = _SCALES | {"dozen": 12}
_SHORT_SCALES = {"k": 10**3, "m": 10**6, "bn": 10**9, "b": 10**9}
# One name and a factor for every spelling of a unit.
_KINDS_OF_UNITS: dict[str, dict[str, float]] = {
        "%": {"%": 1, "percent": 1, "per cent": 1, "pct": 1},
        "m": {"m": 1, "meter": 1, "metre": 1, "km": 1000, "kilometer": 1000, "kilometre": 1000, "cm": 0.01,
              "centimeter": 0.01, "centimetre": 0.01, "mm": 0.001, "mile": 1609.344, "mi": 1609.344, "foot": 0.3048,
              "feet": 0.3048, "ft": 0.3048, "inch": 0.0254, "inche": 0.0254, "yard": 0.9144},
        "g": {"g": 1, "gram": 1, "kg": 1000, "kilogram": 1000, "kilo": 1000, "mg": 0.001, "tonne": 10**6, "ton": 10**6,
              "pound": 453.59237, "lb": 453.59237, "ounce": 28.349523, "oz": 28.349523},
        "s": {"second": 1, "sec": 1, "minute": 60, "min": 60, "hour": 3600, "hr": 3600, "day": 86400, "week": 604800},
        "year": {"year": 1, "yr": 1, "month": 1 / 12, "decade": 10, "century": 100, "centurie": 100},
        "am": {"am": 1, "a.m": 1},
        "pm": {"pm": 1, "p.m": 1},
        "$": {"$": 1, "dollar": 1, "usd": 1},
        "EUR": {"€": 1, "euro": 1, "eur": 1},
        "GBP": {"£": 1, "gbp": 1},
        "JPY": {"¥": 1, "yen": 1, "jpy": 1},
        "degree": {"°": 1, "degree": 1},
        "celsius": {"c": 1, "°c": 1, "degree celsius": 1, "celsius": 1},
        "fahrenheit": {"f": 1, "°f": 1, "degree fahrenheit": 1, "fahrenheit": 1},
        "l": {"liter": 1, "litre": 1, "l": 1, "ml": 0.001},
        "m/s": {"m/s": 1, "km/h": 1 / 3.6, "kph": 1 / 3.6, "mph": 0.44704},
        "watt": {"watt": 1, "w": 1, "kw": 1000, "kilowatt": 1000, "mw": 10**6, "megawatt": 10**6},
        "volt": {"volt": 1, "v": 1, "kv": 1000, "kilovolt": 1000},
        "byte": {"byte": 1, "kb": 10**3, "kilobyte": 10**3, "mb": 10**6, "megabyte": 10**6, "gb": 10**9,
                 "gigabyte": 10**9, "tb": 10**12, "terabyte": 10**12},
        "hz": {"hz": 1, "hertz": 1, "khz": 10**3, "mhz": 10**6, "ghz": 10**9},
}  # fmt: skip
_UNITS = {
    spelling: (name, float(factor))
    for name, spellings in _KINDS_OF_UNITS.items()
    for spelling, factor in spellings.items()
}
# Signs that a bare number does not share.
_MARKED = frozenset({"%", "$", "EUR", "GBP", "JPY"})
_DEGREES = frozenset({"degree", "celsius", "fahrenheit"})
_POWERS = {"square": 2, "sq": 2, "cubic": 3}

_DIGIT = re.compile(r"\d")
_DIGITS = re.compile(
    r"(?<![\w.])(?P<digits>(?:\d{1,3}(?:,\d{3}(?!\d))+|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>e[+-]?\d{1,2}(?!\w))?"
    r"(?P<ordinal>(?:st|nd|rd|th)\b)?(?P<short>(?:k|m|bn|b)\b)?"
    r"(?:[\s-]?(?P<scale>hundred|thousand|million|billion|trillion|dozen)s?\b)?",
    re.IGNORECASE,
)
_ROW = "|".join((*_SMALL, *_GROUPS))
_IN_WORDS = re.compile(
    rf"\b(?:(?P<half>half\s)?an?\s(?=(?:{'|'.join(_GROUPS)})\b)|(?=(?:{'|'.join(_SMALL)})\b))"
    rf"(?P<row>(?:{_ROW})\b(?:(?:[\s-]|\sand\s)(?:{_ROW})\b)*)",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"[\s-]?(?:U\.?S\.?\s)?(?P<unit>%|°\s?[CF]\b|°|[ap]\.m\b|degrees?\s(?:celsius|fahrenheit)\b|per\scent\b|"
    r"(?:square|sq\.?|cubic)\s[a-z]+|(?:km/h|m/s)\b|[^\W\d_]+)",
    re.IGNORECASE,
)
_NOUNS = re.compile(r"[\s-]?([^\W\d_]+)(?:[\s-]([^\W\d_]+)(?:[\s-]([^\W\d_]+))?)?")
_CURRENCY = re.compile(r"\s(?:dollars?|usd|euros?|eur|pounds?|gbp|yen)\b", re.IGNORECASE)
# How far back a sign, a currency and a word like "approximately" are looked for.
_WINDOW = 24
_BEFORE = re.compile(
    r"(?P<minus>(?<![\w)\]%°.])(?<!\d\s)[-\u2212]|\b(?:minus|negative)\s)?(?:(?P<money>[$€£¥])\s?(?P<after>[-\u2212])?)?$"
)
_ABOUT = re.compile(
    r"(?:\b(?:about|around|approximately|nearly|almost|roughly|some|over|circa|ca\.?)|~)\s*[$€£¥]?\s*$", re.IGNORECASE
)
_OF_A_YEAR = re.compile(r"\b(?:in|since|until|during|year|circa|late|early|before|after|the|an?)\s$", re.IGNORECASE)
_RANGE = re.compile(r"\s?(?:[-\u2013\u2014]|\bto\b|\band\b|\bor\b)\s?")
_JOINS = frozenset({"to", "and", "or"})
_COMPOUND = re.compile(r"\s(?:and\s)?")


@dataclass(frozen=True, slots=True)
class Number:
    """A quantity."""

    amount: float  # As written, in its own unit
    unit: str = ""  # The name of a known unit, or ""
    factor: float = 1.0  # From its own unit to the base of that name
    step: float = 0.0  # Half of it is how far the amount was rounded at most
    about: bool = False  # Whether it was stated as approximate
    nouns: tuple[str, ...] = ()  # Stems of up to three words after a number without a known unit: what it counts
    text: str = ""  # As written: sign, currency and digits, or words

    @property
    def value(self) -> float:
        """In the unit's base."""
        return self.amount * self.factor

    @property
    def plain(self) -> "Number":
        """The same without how it was written and rounded."""
        return Number(self.amount, self.unit, self.factor, nouns=self.nouns)

    @property
    def is_bare(self) -> bool:
        """Whether it neither has a unit nor counts anything that is named."""
        return not self.unit and not self.nouns

    @property
    def may_be_year(self) -> bool:
        """Whether it is four digits and nothing else."""
        return self.is_bare and len(self.text) == 4 and self.text.isdigit()


@dataclass(frozen=True, slots=True)
class Date:
    """A date; parts that are not given are None."""

    year: int | None  # Or None
    month: int | None  # Or None
    day: int | None  # Or None
    text: str  # As written


@dataclass(frozen=True, slots=True)
class _Mention:
    """A number and its place in the text: from `start`, the number up to `end`, its unit up to `unit_end`."""

    number: Number
    start: int
    end: int
    unit_end: int


def same_number(claimed: Number, other: Number, tolerance: float, *, lone: bool = False) -> bool:
    """Whether two numbers are equal within the rounding of the first.

    Args:
        claimed: What was claimed.
        other: What is known.
        tolerance: Relative difference allowed if `claimed` was stated as approximate.
        lone: Whether `other` stands alone, as a result does, so that its lacking a percent sign says nothing.
    """
    bare = claimed.is_bare or other.is_bare
    if bare and not lone and claimed.unit != other.unit and {claimed.unit, other.unit} & _MARKED:
        return False
    if not bare and not _count_the_same(claimed, other):
        return False
    mine, theirs, step = claimed.value, other.value, claimed.step * claimed.factor
    if bare:
        mine, theirs, step = claimed.amount, other.amount, claimed.step
    allowed = max(step / 2, tolerance * abs(theirs) if claimed.about else 0.0, 1e-9 * abs(theirs))
    return abs(mine - theirs) <= allowed * (1 + 1e-9)


def _count_the_same(first: Number, second: Number) -> bool:
    if first.unit and second.unit:
        both = {first.unit, second.unit}
        return len(both) == 1 or ("degree" in both and both <= _DEGREES)
    if first.unit or second.unit:
        return False
    # an adjective may stand before the noun of either
    return first.nouns[0] in second.nouns or second.nouns[0] in first.nouns


@lru_cache(maxsize=1 << 12)
def unit_of(word: str) -> tuple[str, float] | None:
    """Name of a unit and its factor to the base of that name; None where the word is no known unit."""
    lowered = re.sub(r"(?<=°)\s|(?<=degree)s(?=\s)", "", word.lower())
    power, _, rest = lowered.partition(" ")
    if rest and power.rstrip(".") in _POWERS:
        name, factor = unit_of(rest) or (stem(rest), 1.0)
        exponent = _POWERS[power.rstrip(".")]
        return f"{name}^{exponent}", factor**exponent
    return _UNITS.get(lowered) or _UNITS.get(lowered.removesuffix("s"))


def is_measure(word: str) -> bool:
    """Whether it is digits with an ordinal ending, a short scale or a unit glued to them: "4th", "5bn", "600MB"."""
    ending = word.lstrip("0123456789").lower()
    return ending != word.lower() and (
        ending in {"st", "nd", "rd", "th", *_SHORT_SCALES} or unit_of(ending) is not None
    )


def take_dates(text: str) -> tuple[tuple[Date, ...], str]:
    """The dates of a text, and the text without them."""
    dates: list[Date] = []

    def take(match: re.Match[str]) -> str:
        parts = match.groupdict()
        month = _MONTHS[parts["mon"].lower()] if parts.get("mon") else int(parts["m"]) if parts.get("m") else 0
        if not 1 <= month <= 12:
            return match.group()
        year, day = parts.get("y"), parts.get("d")
        dates.append(Date(int(year) if year else None, month, int(day) if day else None, match.group()))
        return " ; "

    if _MAY_HOLD_DATES.search(text):
        for pattern in _DATES:
            text = pattern.sub(take, text)
    return tuple(dates), text


def take_numbers(text: str) -> tuple[tuple[Number, ...], str]:
    """The numbers of a text, and the text without them and their units."""
    matches: list[_Mention] = []
    if _DIGIT.search(text):
        matches += _each(_DIGITS, _in_digits, text)
    matches += _each(_IN_WORDS, _in_words, text)
    matches.sort(key=lambda match: match.start)
    pieces, last = [], 0
    for match in matches:
        pieces.append(text[last : match.start])
        last = match.unit_end
    rest = " ; ".join((*pieces, text[last:]))
    return tuple(match.number for match in _compounds(_ranges(matches, text), text)), rest


def _each(pattern: re.Pattern[str], reads: Callable[[re.Match[str], str], list[_Mention]], text: str) -> list[_Mention]:
    return [quantity for match in pattern.finditer(text) for quantity in reads(match, text)]


def _in_digits(match: re.Match[str], text: str) -> list[_Mention]:
    start, end = match.span()
    before = text[max(0, start - _WINDOW) : start]
    sign = _BEFORE.search(before)
    assert sign is not None, "it matches nothing as well"
    money, short = sign["money"], (match["short"] or "").lower()
    if short == "m" and not money and not _CURRENCY.match(text, end):
        # without money, "5m" is five metres
        end, short = match.start("short"), ""
    scale = _GROUPS.get((match["scale"] or "").lower(), 1) * _SHORT_SCALES.get(short, 1)
    whole, point, decimals = match["digits"].replace(",", "").partition(".")
    exponent = match["exponent"] or ""
    # a whole number may be rounded only where a scale or an exponent follows, or where it is said to be
    rounded = point or exponent or scale > 1
    number = Number(
        amount=float(f"{whole}{point}{decimals}{exponent}") * scale * (-1 if sign["minus"] or sign["after"] else 1),
        unit=_UNITS[money][0] if money else "",
        step=10.0 ** (int(exponent[1:] or 0) - len(decimals)) * scale if rounded else 0.0,
        about=_ABOUT.search(before) is not None,
        text=sign.group() + text[start:end],
    )
    if match["ordinal"]:
        # "the 21st century" lasts no 21 centuries
        return [_Mention(replace(number, nouns=_nouns(text, end)), start, end, end)]
    quantity = _with_unit(number, start, end, text)
    if number.may_be_year and not quantity.number.unit and _OF_A_YEAR.search(before):
        # "in 1961 scientists" counts no scientists
        return [_Mention(number, start, end, end)]
    return [quantity]


def _in_words(match: re.Match[str], text: str) -> list[_Mention]:
    """The numbers in a row of number words: "two hundred and fifty" is one, "one two three" are three."""
    runs: list[list[re.Match[str]]] = []
    for word in re.finditer(rf"(?:{_ROW})\b", match["row"].lower()):
        if runs and _continues(runs[-1][-1], word, match["row"]):
            runs[-1].append(word)
        else:
            runs.append([word])
    quantities = []
    for run in runs:
        start, end = (match.start("row") + index for index in (run[0].start(), run[-1].end()))
        value = _value([word.group() for word in run]) * (0.5 if match["half"] and run is runs[0] else 1.0)
        number = Number(value, text=text[start:end])
        quantity = _with_unit(number, start, end, text)
        # "one" alone is mostly no number
        if quantity.number.unit or run[0].group() != "one" or len(run) > 1:
            quantities.append(quantity)
    return quantities


def _continues(last: re.Match[str], word: re.Match[str], row: str) -> bool:
    """Whether a number goes on with a word."""
    joined = "and" in row[last.end() : word.start()].lower()
    before, after = last.group(), word.group()
    if after in _GROUPS:
        return not joined and before != "dozen" and _GROUPS.get(before, 0) < _GROUPS[after]
    if before in _GROUPS:
        return before != "dozen"
    return not joined and _SMALL[before] >= 20 and 1 <= _SMALL[after] <= 9


def _value(words: list[str]) -> float:
    total = group = 0
    for word in words:
        if word in _SMALL:
            group += _SMALL[word]
        elif _GROUPS[word] < 1000:
            group = max(group, 1) * _GROUPS[word]
        else:
            total, group = total + max(group, 1) * _GROUPS[word], 0
    return float(total + group)


def _with_unit(number: Number, start: int, end: int, text: str) -> _Mention:
    if number.unit:
        return _Mention(number, start, end, end)
    known = _known_unit(text, end)
    if known is None:
        return _Mention(replace(number, nouns=_nouns(text, end)), start, end, end)
    name, factor, unit_end = known
    return _Mention(replace(number, unit=name, factor=factor), start, end, unit_end)


def _known_unit(text: str, index: int) -> tuple[str, float, int] | None:
    """Name and factor of the unit that stands at an index, and where it ends."""
    match = _UNIT.match(text, index)
    known = unit_of(match["unit"]) if match else None
    return (*known, match.end()) if match and known else None


def _nouns(text: str, index: int) -> tuple[str, ...]:
    """Stems of what is counted; names and adverbs are left out."""
    match = _NOUNS.match(text, index)
    nouns: list[str] = []
    for word in match.groups() if match else ():
        if word is None or is_stop(word):
            break
        if not (word.istitle() and len(word) > 1) and not word.endswith("ly"):
            nouns.append(stem(word))
    return tuple(nouns)


def _ranges(matches: list[_Mention], text: str) -> list[_Mention]:
    """In "5 to 10%" the first number has the unit of the second; in "1990-95" the second the century of the first."""
    made = list(matches)
    for index in range(len(made) - 2, -1, -1):
        first, second = made[index], made[index + 1]
        between = text[first.end : second.start]
        if len(between) > 5 or not _RANGE.fullmatch(between):
            continue
        if first.number.is_bare and second.number.unit:
            number = replace(first.number, unit=second.number.unit, factor=second.number.factor)
            made[index] = replace(first, number=number)
        elif first.number.may_be_year and re.fullmatch(r"\d\d", second.number.text) and between.strip() not in _JOINS:
            century = first.number.amount // 100 * 100
            made[index + 1] = replace(second, number=replace(second.number, amount=century + second.number.amount))
    return made


def _compounds(matches: list[_Mention], text: str) -> list[_Mention]:
    """Makes one quantity of "1 hour 30 minutes"."""
    made: list[_Mention] = []
    for match in matches:
        last = made[-1] if made else None
        if last is None or not _is_part(last, match, text):
            made.append(match)
            continue
        first, second = last.number, match.number
        amount = first.value / second.factor + second.amount
        number = replace(second, amount=amount, about=first.about, text=text[last.start : match.end])
        made[-1] = _Mention(number, last.start, match.end, match.unit_end)
    return made


def _is_part(last: _Mention, match: _Mention, text: str) -> bool:
    between = text[last.unit_end : match.start]
    return (
        bool(last.number.unit)
        and last.number.unit == match.number.unit
        and 0 <= match.number.value < last.number.factor
        and len(between) <= 5
        and _COMPOUND.fullmatch(between) is not None
    )
