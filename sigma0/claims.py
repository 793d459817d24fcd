"""Sentences of a text, and what in them can be checked: numbers, dates, names, quotations, identifiers, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

Kind = Literal["number", "date", "entity", "quote", "code", "link", "statement"]


def _words(text: str) -> list[str]:
    return text.split()


_ABBREVIATIONS = frozenset(
    _words(
        """
        mr mrs ms dr prof sr jr st vs etc inc ltd co corp no vol fig eq ca approx dept univ gov gen col sgt capt
        lt rev hon jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k u.n d.c a.m p.m b.c a.d ph.d
        """
    )
)
_HEDGES = re.compile(
    r"\b(?:i (?:think|believe|guess|suppose|feel|imagine|doubt|hope|wonder|would say)|in my (?:opinion|view)|"
    r"to my mind|perhaps|maybe|possibly|might|(?-i:may)|could|probably|presumably|seems?|appears? to|not sure|"
    r"it is (?:possible|likely)|as far as i know|if i (?:recall|remember))\b",
    re.IGNORECASE,
)
_OPINIONS = re.compile(
    r"\b(?:beautiful|lovely|wonderful|amazing|awful|terrible|nice|great|good|bad|best|worst|better|worse|boring|fun|"
    r"interesting|impressive|pretty|ugly|delicious|favou?rite|should|ought)\b",
    re.IGNORECASE,
)
_NEGATIONS = re.compile(
    r"\b(?:not|no|never|none|nobody|nothing|neither|nor|cannot|without|\w+n't|\w+n’t)\b", re.IGNORECASE
)
_QUESTION = re.compile(r"\?[\"'”’)\]]*$")
_BOUNDARY = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])|\n\s*\n|\n(?=\s*(?:[-*•]|\d+[.)])\s)|\n")

_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan",
            "february feb",
            "march mar",
            "april apr",
            "may",
            "june jun",
            "july jul",
            "august aug",
            "september sep sept",
            "october oct",
            "november nov",
            "december dec",
        ),
        start=1,
    )
    for name in names.split()
}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DATES = (
    re.compile(r"\b(?P<y>\d{4})-(?P<m>\d{2})-(?P<d>\d{2})\b"),
    re.compile(rf"\b(?P<mon>{_MONTH})\.?\s+(?P<d>\d{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<y>\d{{4}}))?\b", re.IGNORECASE),
    re.compile(
        rf"\b(?P<d>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<mon>{_MONTH})\.?(?:,?\s+(?P<y>\d{{4}}))?\b", re.IGNORECASE
    ),
    re.compile(rf"\b(?P<mon>{_MONTH})\.?,?\s+(?P<y>\d{{4}})\b", re.IGNORECASE),
)  # fmt: skip
_WORDS = {
    word: value
    for value, word in enumerate(
        _words(
            """
            zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
            seventeen eighteen nineteen
            """
        )
    )
} | {word: 10 * value for value, word in enumerate(_words("twenty thirty forty fifty sixty seventy eighty ninety"), 2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
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
        "year": {"year": 1, "yr": 1, "decade": 10, "century": 100, "centurie": 100},
        "$": {"$": 1, "dollar": 1, "usd": 1},
        "EUR": {"€": 1, "euro": 1, "eur": 1},
        "GBP": {"£": 1, "gbp": 1},
        "degree": {"°": 1, "degree": 1},
        "l": {"liter": 1, "litre": 1, "l": 1, "ml": 0.001},
}  # fmt: skip
_UNITS = {
    spelling: (name, factor) for name, spellings in _KINDS_OF_UNITS.items() for spelling, factor in spellings.items()
}
_NUMBER = re.compile(
    r"(?P<money>[$€£])?\s?(?<![\w.])(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?P<ordinal>st|nd|rd|th)?(?![\d])"
    r"(?P<short>(?:k|m|bn|b)\b)?(?:[\s-]?(?P<scale>hundred|thousand|million|billion|trillion)s?\b)?"
    r"(?:[\s-]?(?P<unit>%|°|[A-Za-z]+(?:\s?cent)?))?",
    re.IGNORECASE,
)
_SPELLED = re.compile(
    rf"\b(?P<words>(?:{'|'.join(_WORDS)})(?:[\s-](?:{'|'.join(_WORDS)}))?)(?:[\s-](?P<scale>hundred|thousand|million|"
    r"billion|trillion)s?)?(?:[\s-](?P<unit>%|[A-Za-z]+))?\b",
    re.IGNORECASE,
)
_ABOUT = re.compile(
    r"\b(?:about|around|approximately|nearly|almost|roughly|some|over|circa|ca\.?|~)\s*[$€£]?\s*$", re.IGNORECASE
)
_URL = re.compile(r"https?://[^\s<>\"')\]]+|\bwww\.[^\s<>\"')\]]+", re.IGNORECASE)
_QUOTES = re.compile(r"[\"“]([^\"“”]{3,}?)[\"”]|(?<!\w)[‘']([^'‘’]{8,}?)[’'](?!\w)")
_CODE = re.compile(
    r"`([^`\n]+)`|\b([A-Za-z]\w*\(\))|\b([a-z]+(?:_[a-z0-9]+)+)\b|\b([a-z]+[a-z0-9]*[A-Z]\w*)\b|"
    r"\b([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\(\))"
)
_NAME = re.compile(
    r"(?:[A-Z][\w’'-]*|[A-Z]\.)(?:\s+(?:(?:of|the|de|la|von|van|del|da|di|and|&)\s+){0,2}(?:[A-Z][\w’'-]*|[A-Z]\.))*"
)
_COMMANDED = re.compile(
    r"\s*(?:$|[^\w\s,'’.-]|(?:the|a|an|this|that|these|those|your|it|them|to|all|each|every|up|at)\b)"
)
_STOP = frozenset(
    _words(
        """
        a an the this that these those it its he she they we you i his her their our your my who which what when
        where why how is are was were be been being am do does did done has have had having will would shall
        should can could may might must and or but nor so yet for of in on at to from by with without as than
        then if because while although though since until about into over under after before between during
        through against not no yes very also only just more most some any all each every both few many much
        other another such same own too there here however therefore thus moreover furthermore meanwhile
        additionally overall finally first second third one two three it's he's she's that's there's let's
        according unlike like despite even instead still often use see
        call go make take get say usually sometimes always never
        """
    )
)
_FACTS = re.compile(
    r"^(?:the|this|these|those|there|its?|his|her|their|all|every|no|an?)\b|\b(?:is|are|was|were|has|have|had)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Number:
    """A quantity.

    Attributes:
        value: In the unit's base.
        unit: Its name, "" for a bare number, or a word that is no known unit.
        known_unit: Whether the unit is one of a table.
        step: Half of it is how far it was rounded at most, in the unit's base.
        about: Whether it was said to be rough.
        text: As written.
    """

    value: float
    unit: str
    known_unit: bool
    step: float
    about: bool
    text: str


@dataclass(frozen=True)
class Date:
    """A date, as far as it was told.

    Attributes:
        year: Or None.
        month: Or None.
        day: Or None.
        text: As written.
    """

    year: int | None
    month: int | None
    day: int | None
    text: str


@dataclass(frozen=True)
class Checkable:
    """What a sentence states that can be looked up.

    Attributes:
        links: URLs.
        code: Identifiers.
        quotes: What stands in quotation marks.
        dates: Dates with a month.
        numbers: Other numbers, years among them.
        names: Names of people, places, works.
    """

    links: tuple[str, ...]
    code: tuple[str, ...]
    quotes: tuple[str, ...]
    dates: tuple[Date, ...]
    numbers: tuple[Number, ...]
    names: tuple[str, ...]

    @property
    def kind(self) -> Kind | None:
        """The hardest thing in it."""
        for kind, found in (
            ("link", self.links),
            ("code", self.code),
            ("quote", self.quotes),
            ("date", self.dates),
            ("number", self.numbers),
            ("entity", self.names),
        ):
            if found:
                return kind  # type: ignore[return-value]
        return None


def sentences(text: str) -> list[str]:
    """The sentences of a text; items of a list are sentences too."""
    parts: list[str] = []
    for piece in _BOUNDARY.split(text):
        stripped = piece.strip()
        if not stripped:
            continue
        if parts and _ends_in_abbreviation(parts[-1]):
            parts[-1] = f"{parts[-1]} {stripped}"
        else:
            parts.append(stripped)
    return [re.sub(r"^(?:[-*•]|\d+[.)])\s+", "", part) for part in parts]


def _ends_in_abbreviation(sentence: str) -> bool:
    last = sentence.rsplit(maxsplit=1)[-1]
    if not last.endswith("."):
        return False
    word = last[:-1].lstrip("(\"'“").lower()
    return word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")


def is_hedged(sentence: str) -> bool:
    """Whether it is told as a guess."""
    return bool(_HEDGES.search(sentence))


def is_opinion(sentence: str) -> bool:
    """Whether it judges rather than states."""
    return bool(_OPINIONS.search(sentence))


def is_question(sentence: str) -> bool:
    """Whether it asks."""
    return bool(_QUESTION.search(sentence))


def is_negated(sentence: str) -> bool:
    """Whether it denies something: an odd number of negations."""
    return len(_NEGATIONS.findall(sentence)) % 2 == 1


def is_statement(sentence: str) -> bool:
    """Whether it states something about something, in enough words to be looked up."""
    return bool(_FACTS.search(sentence)) and len(content_words(sentence)) >= 2


def content_words(text: str) -> list[str]:
    """Stems of the words that carry meaning; numbers and units are compared by themselves."""
    words = re.findall(r"[A-Za-z][A-Za-z’'-]+", text)
    return [stem(word) for word in words if word.lower() not in _STOP and _unit(word)[1] is None]


def stem(word: str) -> str:
    """A word without its commonest endings, lower case."""
    lowered = re.sub(r"[’']s?$", "", word.lower())
    for ending, instead in (
        ("ies", "y"),
        ("sses", "ss"),
        ("ing", ""),
        ("ied", "y"),
        ("ed", ""),
        ("es", "e"),
        ("s", ""),
    ):
        if lowered.endswith(ending) and len(lowered) - len(ending) >= 3 and not lowered.endswith("ss"):
            return (lowered[: -len(ending)] + instead).rstrip("e")
    return lowered.rstrip("e") if len(lowered) > 3 else lowered


def checkable(sentence: str, common: frozenset[str] = frozenset()) -> Checkable:
    """What of a sentence can be looked up.

    Args:
        sentence: One sentence.
        common: Words known in lower case elsewhere, so that a capital at the beginning makes them no name.
    """
    links = tuple(match.rstrip(".,;:") for match in _URL.findall(sentence))
    rest = _URL.sub(" ", sentence)
    code = tuple(next(filter(None, groups)).strip() for groups in _CODE.findall(rest))
    rest = _CODE.sub(" ", rest)
    quotes = tuple(next(filter(None, groups)).strip(" .,;") for groups in _QUOTES.findall(rest))
    dates, rest = _take_dates(rest)
    numbers, rest = _take_numbers(rest)
    names = tuple(_names(_QUOTES.sub(" \n ", rest), common))
    return Checkable(links, code, quotes, dates, numbers, names)


def _take_dates(text: str) -> tuple[tuple[Date, ...], str]:
    found = []
    for pattern in _DATES:
        for match in pattern.finditer(text):
            parts = match.groupdict()
            month = _MONTHS[parts["mon"].lower()] if parts.get("mon") else int(parts["m"])
            year, day = parts.get("y"), parts.get("d")
            found.append(Date(int(year) if year else None, month, int(day) if day else None, match.group()))
        text = pattern.sub(" ; ", text)
    return tuple(found), text


def _take_numbers(text: str) -> tuple[tuple[Number, ...], str]:
    found = []
    for match in _NUMBER.finditer(text):
        number = _number(match, text)
        if number is not None:
            found.append(number)
    text = _NUMBER.sub(lambda match: f" ; {match['unit'] or ''}", text)
    for match in _SPELLED.finditer(text):
        parts = re.split(r"[\s-]", match["words"].lower())
        # "one" alone is mostly no number
        if parts == ["one"] and not match["scale"] and _unit(match["unit"])[1] is None:
            continue
        value = sum(_WORDS[part] for part in parts) * _SCALES.get((match["scale"] or "").lower(), 1)
        found.append(_measured(float(value), 0.0, None, match["unit"], match.group(), False))
    return tuple(found), _SPELLED.sub(lambda match: f" ; {match['unit'] or ''}", text)


def _number(match: re.Match[str], text: str) -> Number | None:
    digits = match["digits"].replace(",", "")
    try:
        exact = Decimal(digits)
    except InvalidOperation:
        return None
    scale = _SCALES.get((match["scale"] or "").lower(), 1) * _SHORT_SCALES.get((match["short"] or "").lower(), 1)
    decimals = -int(exact.as_tuple().exponent) if "." in digits else 0
    # a whole number may be rounded only where a scale follows, or where it is said to be
    step = 10.0**-decimals * scale if "." in digits or scale > 1 else 0.0
    about = bool(_ABOUT.search(text[: match.start("digits")]))
    return _measured(float(exact) * scale, step, match["money"], match["unit"], match.group().strip(), about)


def _measured(value: float, step: float, money: str | None, unit: str | None, text: str, about: bool) -> Number:
    name, factor = _unit(money or unit)
    if factor is None:
        return Number(value, name, False, step, about, text)
    return Number(value * factor, name, True, step * factor, about, text)


def _unit(word: str | None) -> tuple[str, float | None]:
    """Name of a unit and its factor; None where the word is no unit of the table."""
    if not word:
        return "", None
    lowered = word.lower()
    for spelling in (lowered, lowered.removesuffix("s")):
        if spelling in _UNITS:
            name, factor = _UNITS[spelling]
            return name, float(factor)
    return stem(word), None


def _names(text: str, common: frozenset[str]) -> Iterator[str]:
    start = True
    for line in text.split("\n"):
        for match in _NAME.finditer(line):
            words = match.group().split()
            beginning = start and not line[: match.start()].strip(" \"'“‘(*_;")
            # a capital at the beginning says nothing of a word that is common, or that commands ("Use the ...")
            commands = len(words) == 1 and bool(_COMMANDED.match(line[match.end() :]))
            while words and (
                words[0].lower() in _STOP or (beginning and (commands or _is_common(words[0], len(words), common)))
            ):
                words, beginning = words[1:], False
            while words and words[-1].lower() in _STOP:
                words = words[:-1]
            name = re.sub(r"[’']s$", "", " ".join(words)).strip(" .,'’")
            if len(name) > 1 and name.lower() not in _STOP:
                yield name
        start = False


def _is_common(word: str, words: int, common: frozenset[str]) -> bool:
    bare = re.sub(r"[’']s$", "", word).lower()
    return bare in common or stem(bare) in common or (words == 1 and bare.endswith(("ing", "ly")))
