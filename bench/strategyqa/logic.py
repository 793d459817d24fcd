"""A condition on the answers to numbered steps, such as `#1 < #2 and not #3`, worked out in Python.

    condition  any ("or" any)*        any         all ("and" all)*        all  "not" all | "(" condition ")" | relation
    relation   operand [sign operand]             sign  < <= > >= = == !=
    operand    #1, a number, yes, no, true, false, or a text in double quotes

It is parsed and never executed. What cannot be told stays open: `no and open` is no, `yes or open` is yes, and any
other condition that rests on it is open.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sigma0.bench.strategyqa.values import Relation, Undecided, Value, compare, value_of

MAX_LENGTH = 200
_DEPTH = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<step>#\d{1,3})|(?P<number>-?\d{1,15}(?:\.\d{1,15})?)|(?P<text>\"[^\"]*\")|(?P<sign><=|>=|==|!=|<|>|=)|"
    r"(?P<word>[A-Za-z]+)|(?P<bracket>[()]))"
)
_SIGNS: dict[str, Relation] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "=": "=", "==": "=", "!=": "!="}


@dataclass(frozen=True)
class Operand:
    """A step's answer, or a value that is written out.

    Attributes:
        step: From 1 on; None for a value.
        value: None for a step.
    """

    step: int | None
    value: Value | None = None


@dataclass(frozen=True)
class Compared:
    """Two operands and what is asked of them; without a second, the first is a yes or no.

    Attributes:
        first: The left one.
        relation: Between them.
        second: The right one.
    """

    first: Operand
    relation: Relation = "="
    second: Operand | None = None


@dataclass(frozen=True)
class Joined:
    """Conditions joined.

    Attributes:
        word: By what.
        parts: One for `not`, else at least two.
    """

    word: Literal["and", "or", "not"]
    parts: tuple["Condition", ...]


Condition = Compared | Joined


def parse_condition(text: str) -> Condition:
    """The condition in a text.

    Raises:
        ValueError: If the text is none, or is longer than 200 characters.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a condition has at most {MAX_LENGTH} characters, got {len(text)}")
    parser = _Parser(_tokens(text))
    found = parser.condition(0)
    if parser.left:
        raise ValueError(f"the condition goes on with {parser.left[0][1]!r} where it should end")
    return found


def names_step(condition: Condition) -> bool:
    """Whether a condition rests on any step; one that does not is true or false whatever the answers are."""
    if isinstance(condition, Joined):
        return any(names_step(part) for part in condition.parts)
    return condition.first.step is not None or (condition.second is not None and condition.second.step is not None)


def evaluate(condition: Condition, values: Sequence[Value]) -> bool | Undecided:
    """Whether a condition holds.

    Args:
        condition: It.
        values: Of the steps, in order.
    """
    if isinstance(condition, Joined):
        parts = [evaluate(part, values) for part in condition.parts]
        if condition.word == "not":
            return parts[0] if isinstance(parts[0], Undecided) else not parts[0]
        decides = condition.word == "or"
        if any(part is decides for part in parts):
            return decides
        return next((part for part in parts if isinstance(part, Undecided)), not decides)
    first = _value(condition.first, values)
    second = Value("truth", "yes", truth=True) if condition.second is None else _value(condition.second, values)
    if isinstance(first, Undecided):
        return first
    return second if isinstance(second, Undecided) else compare(first, condition.relation, second)


def _value(operand: Operand, values: Sequence[Value]) -> Value | Undecided:
    if operand.step is None:
        assert operand.value is not None
        return operand.value
    if not 1 <= operand.step <= len(values):
        return Undecided(f"there is no step #{operand.step}")
    return values[operand.step - 1]


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

    def condition(self, depth: int) -> Condition:
        return self._joined("or", depth)

    def _joined(self, word: Literal["and", "or"], depth: int) -> Condition:
        parts = [self._part(word, depth)]
        while self._takes("word", word):
            parts.append(self._part(word, depth))
        return parts[0] if len(parts) == 1 else Joined(word, tuple(parts))

    def _part(self, word: Literal["and", "or"], depth: int) -> Condition:
        return self._joined("and", depth) if word == "or" else self._single(depth)

    def _single(self, depth: int) -> Condition:
        if depth > _DEPTH:
            raise ValueError(f"a condition goes at most {_DEPTH} deep")
        if self._takes("word", "not"):
            return Joined("not", (self._single(depth + 1),))
        if self._takes("bracket", "("):
            found = self.condition(depth + 1)
            if not self._takes("bracket", ")"):
                raise ValueError("a bracket of the condition is not closed")
            return found
        first = self._operand()
        if not self.left or self.left[0][0] != "sign":
            return Compared(first)
        return Compared(first, _SIGNS[self.left.pop(0)[1]], self._operand())

    def _operand(self) -> Operand:
        if not self.left:
            raise ValueError("the condition ends too early")
        kind, text = self.left.pop(0)
        if kind == "step":
            return Operand(int(text[1:]))
        if kind == "number":
            return Operand(None, Value("number", text, number=float(text)))
        if kind == "text":
            return Operand(None, value_of(text))
        if kind == "word" and text in ("yes", "no", "true", "false"):
            return Operand(None, Value("truth", text, truth=text in ("yes", "true")))
        raise ValueError(f"{text!r} is no step, number, yes, no or quoted text")

    def _takes(self, kind: str, text: str) -> bool:
        taken = bool(self.left) and self.left[0] == (kind, text)
        if taken:
            self.left.pop(0)
        return taken
