"""What short answers say as values that Python can compare, and conditions on them.

A condition on the answers to numbered steps, such as `#1 < #2 and not #3`: in Python's grammar, of operands that are
steps, numbers, yes, no, true, false, or texts in double quotes; `=` is `==`, and a single operand is compared to yes.
It is parsed and never executed. What cannot be told stays open: `no and open` is no, `yes or open` is yes, and any
other condition that rests on it is open.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Literal, get_args

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


_YES = Value("truth", "yes", truth=True)


def value_of(text: str) -> Value:
    """The value of an answer's first line: yes or no that it begins with, else its only number, else a short name.

    A date counts by its year. A number keeps the unit that it was written with in base units: 2 km is 2000 m.
    """
    line = next((item.strip() for item in text.splitlines() if item.strip()), "")[:MAX_ANSWER]
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
    result = numbers[0]
    before_christ = result.nouns[:1] in (("bc",), ("bce",))
    return Value("number", name, number=-result.value if before_christ else result.value, unit=result.unit)


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
    if same or relation in ("=", "!="):
        return same == (relation in ("=", "<=", ">="))
    return (first.number < second.number) == (relation in ("<", "<="))


def _is_name(name: str) -> bool:
    return has_words(name) and len(name) <= MAX_NAME and not _HEDGE.match(name) and not _CODE.search(name)


def _plain(text: str) -> str:
    last = None
    while last != text:
        last, text = text, _AROUND.sub("", text)
    return " ".join(text.split()).casefold()


MAX_LENGTH = 200
_TOKEN = re.compile(
    r"\s*(?:(?P<step>#\d{1,3})|(?P<number>-?\d{1,15}(?:\.\d{1,15})?)|(?P<text>\"[^\"]*\")|(?P<sign><=|>=|==|!=|<|>|=)|"
    r"(?P<word>[A-Za-z]+)|(?P<bracket>[()])|(?P<other>\S.{0,19}))\s*"
)
_TRUTHS = {"yes": True, "no": False, "true": True, "false": False}
_RELATIONS: dict[type[ast.cmpop], Relation] = dict(
    zip((ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq), get_args(Relation), strict=True)
)


@dataclass(frozen=True)
class Condition:
    """Python's tree of a condition; names `v0`, `v1`, ... stand for operands: numbers of steps, from 1, or values."""

    tree: ast.expr
    operands: tuple[int | Value, ...]


def parse_condition(text: str) -> Condition:
    """The condition in a text.

    Raises:
        ValueError: If the text is none, or is longer than 200 characters.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a condition has at most {MAX_LENGTH} characters, got {len(text)}")
    operands: list[int | Value] = []

    def python(match: re.Match[str]) -> str:
        token, word = match.group().strip(), match.group().strip().lower()
        if match["sign"]:
            return "==" if token == "=" else token
        if match["bracket"] or word in ("and", "or", "not"):
            return f" {word} "
        if match["step"]:
            operands.append(int(token[1:]))
        elif match["number"]:
            operands.append(Value("number", token, number=float(token)))
        elif match["text"]:
            operands.append(value_of(token))
        elif word in _TRUTHS:
            operands.append(Value("truth", word, truth=_TRUTHS[word]))
        else:
            raise ValueError(f"{token!r} is no part of a condition")
        return f" v{len(operands) - 1} "

    try:
        tree = ast.parse(_TOKEN.sub(python, text).strip(), mode="eval").body
    # the others where it is nested too deep
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is no condition: {error}") from error
    if not _is_condition(tree):
        raise ValueError(f"{text[:60]!r} is no condition: it compares more than two answers")
    return Condition(tree, tuple(operands))


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(map(_is_condition, node.values))
    if isinstance(node, ast.UnaryOp):
        return _is_condition(node.operand)
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and isinstance(node.left, ast.Name) and isinstance(node.comparators[0], ast.Name)
    return isinstance(node, ast.Name)


def names_step(condition: Condition) -> bool:
    """Whether a condition rests on any step; one that does not is true or false whatever the answers are."""
    return any(isinstance(operand, int) for operand in condition.operands)


def evaluate(condition: Condition, values: Sequence[Value]) -> bool | str:
    """Whether a condition holds with the values of the steps, in order, or in words why Python cannot tell."""
    return _holds(condition.tree, [_value(operand, values) for operand in condition.operands])


def _holds(node: ast.expr, operands: Sequence[Value | str]) -> bool | str:
    if isinstance(node, ast.BoolOp):
        parts = [_holds(item, operands) for item in node.values]
        decides = isinstance(node.op, ast.Or)
        if any(part is decides for part in parts):
            return decides
        return next((part for part in parts if isinstance(part, str)), not decides)
    if isinstance(node, ast.UnaryOp):
        part = _holds(node.operand, operands)
        return part if isinstance(part, str) else not part
    relation: Relation = "="
    names: list[ast.expr] = [node]
    if isinstance(node, ast.Compare):
        names, relation = [node.left, *node.comparators], _RELATIONS[type(node.ops[0])]
    result = [operands[int(name.id[1:])] for name in names if isinstance(name, ast.Name)]
    first, second = (*result, _YES)[:2]
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else str(second)
    return compare(first, relation, second)


def _value(operand: int | Value, values: Sequence[Value]) -> Value | str:
    if isinstance(operand, Value):
        return operand
    return values[operand - 1] if 1 <= operand <= len(values) else f"there is no step #{operand}"
