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
from typing import Literal, cast

from sigma0.bench.strategyqa.values import Relation, Undecided, Value, compare, value_of

MAX_LENGTH = 200
_DEPTH = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<step>#\d{1,3})|(?P<number>-?\d{1,15}(?:\.\d{1,15})?)|(?P<text>\"[^\"]*\")|(?P<sign><=|>=|==|!=|<|>|=)|"
    r"(?P<word>[A-Za-z]+)|(?P<bracket>[()]))"
)
_SIGNS: dict[str, Relation] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "=": "=", "==": "=", "!=": "!="}


@dataclass(frozen=True)
class Condition:
    """Conditions joined, or operands compared: numbers of steps, from 1 on, and values that are written out.

    Attributes:
        sign: `and`, `or`, `not`, or a relation.
        parts: One for `not`, two for a relation, else at least two.
    """

    sign: Literal["and", "or", "not"] | Relation
    parts: tuple["Condition | int | Value", ...]


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


def evaluate(condition: Condition, values: Sequence[Value]) -> bool | Undecided:
    """Whether a condition holds.

    Args:
        condition: It.
        values: Of the steps, in order.
    """
    parts = [
        evaluate(part, values) if isinstance(part, Condition) else _value(part, values) for part in condition.parts
    ]
    unknown = next((part for part in parts if isinstance(part, Undecided)), None)
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


def _value(operand: int | Value, values: Sequence[Value]) -> Value | Undecided:
    if isinstance(operand, Value):
        return operand
    return values[operand - 1] if 1 <= operand <= len(values) else Undecided(f"there is no step #{operand}")


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
