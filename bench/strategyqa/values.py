"""What a short answer of a model says, as a value that Python can compare: yes or no, a number, a name, or nothing."""

import re
from dataclasses import dataclass
from math import isclose
from typing import Literal

from sigma0.bench.strategyqa.level import YES_OR_NO, has_words
from sigma0.signals.grounding.quantities import take_dates, take_numbers

Kind = Literal["truth", "number", "name", "open"]
Relation = Literal["<", "<=", ">", ">=", "=", "!="]
_TRUTH = re.compile(rf"^\W*(?:{YES_OR_NO}|(true|false)\b)", re.IGNORECASE)
_AROUND = re.compile(r"^(?:the|an?)\s+|[\s.,;:!?\"'*]+$|^[\s\"'*]+", re.IGNORECASE)
# of an answer; what stands behind is no short answer
MAX_LENGTH = 200
# characters of a name at most: more are prose, and prose that differs tells nothing
MAX_NAME = 60
_HEDGE = re.compile(
    r"(?:maybe|perhaps|possibly|unknown|unclear|uncertain|undetermined|it depends|n/a|(?:i'm |i am )?(?:not|un)\s?sure|"
    r"i (?:don't|do not|can't|cannot)|it is (?:not known|unknown|unclear)|not (?:known|given|stated)|yes|no)\b"
)
_CODE = re.compile(r"[{}\[\]<>|\\]")


@dataclass(frozen=True)
class Value:
    """What an answer says.

    Attributes:
        kind: Which of them; "open" is an answer that tells nothing: a hedge, prose, or code.
        truth: Of yes or no.
        number: In the base of its unit; years before Christ are negative.
        unit: Name of a known unit, or "".
        name: The answer without case, article and marks around it; kept for all kinds.
    """

    kind: Kind
    name: str
    truth: bool = False
    number: float = 0.0
    unit: str = ""

    def __str__(self) -> str:
        if self.kind == "truth":
            return "yes" if self.truth else "no"
        return f"{self.number:g} {self.unit}".strip() if self.kind == "number" else self.name


@dataclass(frozen=True)
class Undecided:
    """Why Python cannot tell.

    Attributes:
        why: In words.
    """

    why: str


def value_of(text: str) -> Value:
    """The value of an answer's first line: yes or no that it begins with, else its only number, else a short name.

    A date counts by its year. A number keeps the unit that it was written with in base units: 2 km is 2000 m.
    """
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")[:MAX_LENGTH]
    name = _plain(line)
    truth = _TRUTH.match(line)
    if truth is not None:
        return Value("truth", name, truth=(truth.group(1) or truth.group(2)).lower() in ("yes", "true"))
    dates, rest = take_dates(line)
    numbers, _ = take_numbers(rest)
    years = [date.year for date in dates if date.year is not None]
    if len(years) == 1 and len(dates) == 1 and not numbers:
        return Value("number", name, number=float(years[0]))
    if len(numbers) != 1 or dates:
        return Value("name" if _is_name(name) else "open", name)
    found = numbers[0]
    before_christ = found.nouns[:1] in (("bc",), ("bce",))
    return Value("number", name, number=-found.value if before_christ else found.value, unit=found.unit)


def compare(first: Value, relation: Relation, second: Value) -> bool | Undecided:
    """Whether two values stand in a relation.

    Numbers are compared where they have the same unit or both have none; names and truths are equal or are not.
    """
    for value in (first, second):
        if value.kind == "open":
            return Undecided(f"{value.name[:60]!r} is no short answer")
    if first.kind != second.kind:
        return Undecided(f"{first} and {second} are a {first.kind} and a {second.kind}")
    if first.kind == "number":
        return _numbers(first, relation, second)
    if relation not in ("=", "!="):
        return Undecided(f"{first} and {second} are no numbers, so that neither is smaller")
    same = first.truth == second.truth if first.kind == "truth" else first.name == second.name
    return same == (relation == "=")


def _numbers(first: Value, relation: Relation, second: Value) -> bool | Undecided:
    if first.unit != second.unit:
        return Undecided(f"{first} and {second} have different units")
    same = isclose(first.number, second.number, rel_tol=1e-9)
    smaller = first.number < second.number and not same
    return {
        "=": same,
        "!=": not same,
        "<": smaller,
        "<=": smaller or same,
        ">": not (smaller or same),
        ">=": not smaller,
    }[relation]


def _is_name(name: str) -> bool:
    return has_words(name) and len(name) <= MAX_NAME and not _HEDGE.match(name) and not _CODE.search(name)


def _plain(text: str) -> str:
    last = None
    while last != text:
        last, text = text, _AROUND.sub("", text)
    return " ".join(text.split()).casefold()
