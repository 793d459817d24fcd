"""What short answers say as values that Python can compare, and conditions on them.

A condition on the answers to numbered steps, such as `#1 < #2 and not #3`, worked out in Python.

    condition  any ("or" any)*        any         all ("and" all)*        all  "not" all | "(" condition ")" | relation
    relation   operand [sign operand]             sign  < <= > >= = == !=
    operand    #1, a number, yes, no, true, false, or a text in double quotes

It is parsed and never executed. What cannot be told stays open: `no and open` is no, `yes or open` is yes, and any
other condition that rests on it is open.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal, cast

from sigma0.bench.strategyqa.level import YES_OR_NO, has_words
from sigma0.signals.grounding.quantities import take_dates, take_numbers

Kind = Literal["truth", "number", "name", "open"]
Relation = Literal["<", "<=", ">", ">=", "=", "!="]
_TRUTH = re.compile(rf"^\W*(?:{YES_OR_NO}|(true|false)\b)", re.IGNORECASE)
_AROUND = re.compile(r"^(?:the|an?)\s+|[\s.,;:!?\"'*]+$|^[\s\"'*]+", re.IGNORECASE)
# of an answer; what stands behind is no short answer
MAX_ANSWER = 200
# characters of a name at most: more are prose, and prose that differs tells nothing
MAX_NAME = 60
_HEDGE = re.compile(
    r"(?:maybe|perhaps|possibly|unknown|unclear|uncertain|undetermined|it depends|n/a|(?:i'm |i am )?(?:not|un)\s?sure|"
    r"i (?:don't|do not|can't|cannot)|it is (?:not known|unknown|unclear)|not (?:known|given|stated)|yes|no)\b"
)
_CODE = re.compile(r"[{}\[\]<>|\\]")


@dataclass(frozen=True)
class Value:
    """What an answer says."""

    kind: Kind  # Which of them; "open" is an answer that tells nothing: a hedge, prose, or code
    name: str  # The answer without case, article and marks around it; kept for all kinds
    truth: bool = False  # Of yes or no
    number: float = 0.0  # In the base of its unit; years before Christ are negative
    unit: str = ""  # Name of a known unit, or ""

    def __str__(self) -> str:
        if self.kind == "truth":
            return "yes" if self.truth else "no"
        return f"{self.number:g} {self.unit}".strip() if self.kind == "number" else self.name


def value_of(text: str) -> Value:
    """The value of an answer's first line: yes or no that it begins with, else its only number, else a short name.

    A date counts by its year. A number keeps the unit that it was written with in base units: 2 km is 2000 m.
    """
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")[:MAX_ANSWER]
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


def compare(first: Value, relation: Relation, second: Value) -> bool | str:
    """Whether two values stand in a relation, or in words why Python cannot tell.

    Numbers are compared where they have the same unit or both have none; names and truths are equal or are not.
    """
    for value in (first, second):
        if value.kind == "open":
            return f"{value.name[:60]!r} is no short answer"
    if first.kind != second.kind:
        return f"{first} and {second} are a {first.kind} and a {second.kind}"
    if first.kind == "number":
        return _numbers(first, relation, second)
    if relation not in ("=", "!="):
        return f"{first} and {second} are no numbers, so that neither is smaller"
    same = first.truth == second.truth if first.kind == "truth" else first.name == second.name
    return same == (relation == "=")


def _numbers(first: Value, relation: Relation, second: Value) -> bool | str:
    if first.unit != second.unit:
        return f"{first} and {second} have different units"
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


MAX_LENGTH = 200
_DEPTH = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<step>#\d{1,3})|(?P<number>-?\d{1,15}(?:\.\d{1,15})?)|(?P<text>\"[^\"]*\")|(?P<sign><=|>=|==|!=|<|>|=)|"
    r"(?P<word>[A-Za-z]+)|(?P<bracket>[()]))"
)
_SIGNS: dict[str, Relation] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "=": "=", "==": "=", "!=": "!="}


@dataclass(frozen=True)
class Condition:
    """Conditions joined, or operands compared: numbers of steps, from 1 on, and values that are written out."""

    sign: Literal["and", "or", "not"] | Relation  # `and`, `or`, `not`, or a relation
    parts: tuple["Condition | int | Value", ...]  # One for `not`, two for a relation, else at least two


_YES = Value("truth", "yes", truth=True)


def parse_condition(text: str) -> Condition:
    """The condition in a text.

    Raises:
        ValueError: If the text is none, or is longer than 200 characters.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a condition has at most {MAX_LENGTH} characters, got {len(text)}")
    parser = _Parser(_tokens(text))
    found = parser.joined("or", 0)
    if parser.left:
        raise ValueError(f"the condition goes on with {parser.left[0][1]!r} where it should end")
    return found


def names_step(condition: Condition) -> bool:
    """Whether a condition rests on any step; one that does not is true or false whatever the answers are."""
    return any(names_step(part) if isinstance(part, Condition) else isinstance(part, int) for part in condition.parts)


def evaluate(condition: Condition, values: Sequence[Value]) -> bool | str:
    """Whether a condition holds, or in words why Python cannot tell.

    Args:
        condition: It.
        values: Of the steps, in order.
    """
    parts = [
        evaluate(part, values) if isinstance(part, Condition) else _value(part, values) for part in condition.parts
    ]
    unknown = next((part for part in parts if isinstance(part, str)), None)
    if condition.sign in ("and", "or"):
        decides = condition.sign == "or"
        if any(part is decides for part in parts):
            return decides
        return not decides if unknown is None else unknown
    if unknown is not None:
        return unknown
    if condition.sign == "not":
        return not parts[0]
    first, second = parts
    assert isinstance(first, Value) and isinstance(second, Value)
    return compare(first, cast(Relation, condition.sign), second)


def _value(operand: int | Value, values: Sequence[Value]) -> Value | str:
    if isinstance(operand, Value):
        return operand
    return values[operand - 1] if 1 <= operand <= len(values) else f"there is no step #{operand}"


def _tokens(text: str) -> list[tuple[str, str]]:
    found, place, text = [], 0, text.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place : place + 20]!r} is no part of a condition")
        kind = match.lastgroup
        assert kind is not None
        found.append((kind, match.group(kind).lower() if kind == "word" else match.group(kind)))
        place = match.end()
    return found


class _Parser:
    """Takes tokens off the left, by the rules above."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.left = tokens

    def joined(self, word: Literal["and", "or"], depth: int) -> Condition:
        """Conditions joined by a word, or one alone."""
        parts = [self._part(word, depth)]
        while self._takes("word", word):
            parts.append(self._part(word, depth))
        return parts[0] if len(parts) == 1 else Condition(word, tuple(parts))

    def _part(self, word: Literal["and", "or"], depth: int) -> Condition:
        return self.joined("and", depth) if word == "or" else self._single(depth)

    def _single(self, depth: int) -> Condition:
        if depth > _DEPTH:
            raise ValueError(f"a condition goes at most {_DEPTH} deep")
        if self._takes("word", "not"):
            return Condition("not", (self._single(depth + 1),))
        if self._takes("bracket", "("):
            found = self.joined("or", depth + 1)
            if not self._takes("bracket", ")"):
                raise ValueError("a bracket of the condition is not closed")
            return found
        first = self._operand()
        if not self.left or self.left[0][0] != "sign":
            return Condition("=", (first, _YES))
        return Condition(_SIGNS[self.left.pop(0)[1]], (first, self._operand()))

    def _operand(self) -> int | Value:
        if not self.left:
            raise ValueError("the condition ends too early")
        kind, text = self.left.pop(0)
        if kind == "step":
            return int(text[1:])
        if kind == "number":
            return Value("number", text, number=float(text))
        if kind == "text":
            return value_of(text)
        if kind == "word" and text in ("yes", "no", "true", "false"):
            return Value("truth", text, truth=text in ("yes", "true"))
        raise ValueError(f"{text!r} is no step, number, yes, no or quoted text")

    def _takes(self, kind: str, text: str) -> bool:
        taken = bool(self.left) and self.left[0] == (kind, text)
        if taken:
            self.left.pop(0)
        return taken
