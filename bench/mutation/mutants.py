"""Mutants of sources: what cosmic-ray's operators make of each place in the logic, and a sample of them.

Not all replacements are taken. Arithmetic is replaced by arithmetic and bit operators by bit operators, an order by an
order and `is` by `is not`: the others mostly raise a TypeError at once, which any test notices. The operators for
single variables are left out, since they draw at random.
"""

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sigma0.bench.mutation.logic import Position, Scope, Source

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod")
_BITS = ("BitOr", "BitAnd", "BitXor")
_ORDER = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
_ALIKE = {
    "ReplaceBinaryOperator": (_ARITHMETIC, _BITS, ("RShift", "LShift")),
    "ReplaceComparisonOperator": (_ORDER, ("Is", "IsNot")),
}
_RANDOM = ("VariableReplacer", "VariableInserter")
# in the others a sign such as `*` is no operator: `f(*items)`
_EXPRESSIONS = ("arith_expr", "term", "expr", "and_expr", "xor_expr", "shift_expr", "power")


@dataclass(frozen=True)
class Mutant:
    """A source with one change.

    Attributes:
        file: The source, relative to the tree.
        line: Of the change.
        operator: cosmic-ray's name of what made it.
        text: The whole source, changed.
        diff: Of the source and it.
        before: The changed line as it was, without its indent.
        after: As it is.
        scope: Where the line stands.
    """

    file: str
    line: int
    operator: str
    text: str
    diff: str
    before: str
    after: str
    scope: Scope


@dataclass(frozen=True)
class _Change:
    """An operator's n-th chance in a source."""

    operator: str
    occurrence: int


def places(text: str) -> dict[tuple[Position, str], list[_Change]]:
    """The places of a source that can be mutated, by where they are and the kind of operator, each with its changes.

    Args:
        text: The source.
    """
    from cosmic_ray.ast import ast_nodes, get_ast

    source = Source(text)
    nodes = list(ast_nodes(get_ast(text)))
    found: dict[tuple[Position, str], list[_Change]] = defaultdict(list)
    for name, operator in _operators().items():
        occurrence = 0
        kind = name.split("_")[0]
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                misread = kind == "ReplaceBinaryOperator" and node.parent.type not in _EXPRESSIONS
                if not misread and source.is_logic(start):
                    found[start, kind].append(_Change(name, occurrence))
                occurrence += 1
    return dict(sorted(found.items()))


def mutate(file: str, text: str, change: _Change, line: int) -> Mutant | None:
    """The source with a change; None where that is no Python, or the same program.

    Args:
        file: Name of the source.
        text: The source.
        change: One of `places`.
        line: Of its place.
    """
    from cosmic_ray.mutating import mutate_code

    mutated: str | None
    try:
        mutated = mutate_code(text, _operators()[change.operator], change.occurrence)
    except AttributeError:
        return None  # one of several exceptions has a dotted name, which cosmic-ray cannot replace
    if mutated is None or not _differs(text, mutated):
        return None
    old, new = text.splitlines(), mutated.splitlines()
    diff = "\n".join(list(difflib.unified_diff(old, new, file, file, lineterm="", n=1)))
    before, after = (
        " ".join(filter(None, (each[1:].strip() for each in diff.splitlines()[2:] if each.startswith(sign))))
        for sign in "-+"
    )
    return Mutant(file, line, change.operator, mutated, diff, before, after, Source(text).scope(line))


def sample(root: Path, folders: Mapping[str, Sequence[str]], n: int, seed: int, least: int) -> dict[str, list[Mutant]]:
    """Draws mutants of each folder: a place with equal chances, then one of its changes.

    Each folder gets as many as its share of all places, but no fewer than `least` as far as it has them, so that its
    own score means something.

    Args:
        root: The tree.
        folders: The sources of each folder, relative to the tree.
        n: How many in all.
        seed: Of the draw.
        least: Of each folder.
    """
    drawing = random.Random(seed)
    known = {folder: list(_all_places(root, sources)) for folder, sources in folders.items()}
    whole = sum(len(found) for found in known.values())
    drawn = {}
    for folder, found in known.items():
        size = min(max(round(n * len(found) / max(whole, 1)), min(least, n)), len(found))
        drawing.shuffle(found)
        drawn[folder] = list(_first(root, found, size, drawing))
    return drawn


def _first(
    root: Path, found: list[tuple[str, Position, list[_Change]]], size: int, drawing: random.Random
) -> Iterator[Mutant]:
    """Mutants of the first places that have some."""
    made = 0
    for file, (line, _), changes in found:
        if made == size:
            return
        mutant = mutate(file, (root / file).read_text(), drawing.choice(changes), line)
        if mutant is not None:
            made += 1
            yield mutant


def _all_places(root: Path, sources: Sequence[str]) -> Iterator[tuple[str, Position, list[_Change]]]:
    for file in sources:
        for (position, _), changes in places((root / file).read_text()).items():
            yield file, position, changes


def _differs(text: str, mutated: str) -> bool:
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(mutated))
    except SyntaxError:
        return False


@cache
def _operators() -> dict[str, Any]:
    """cosmic-ray's operators by name, those that are taken."""
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in sorted(provider) if _is_taken(name)}


def _is_taken(name: str) -> bool:
    kind, *ends = name.split("_")
    groups = _ALIKE.get(kind)
    return name not in _RANDOM and (groups is None or any(set(ends) <= set(group) for group in groups))
