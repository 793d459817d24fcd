"""How many expressions a text has to match at once: the time of an engine grows exponentially with their number.

Twelve expressions as `(a|b|ab|ba)*c.{8}1` take half a second, and each further one four times as long. The engine
counts states and symbols, and has no bound on this.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# Expressions that a value may have to match at once.
MOST = 8
_EXPRESSIONS = ("pattern", "format")
# Stands for properties whose names are not listed; no other name holds a NUL.
_ANY = "\0"
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def check_schema(text: str) -> None:
    """Refuses a schema, as JSON text, by which a value has to match too many expressions.

    Raises:
        ValueError: Naming how many.
    """
    root = json.loads(text)
    try:
        matched = _matched(root, root, {})
    except RecursionError as error:
        raise ValueError("schema is nested too deep") from error
    # properties of any name intersect those of each name
    _refuse("schema", matched.pop(_ANY, 0) + max(matched.values(), default=0))


def check_grammar(lark: str) -> None:
    """Refuses a grammar in Lark's notation that intersects too many expressions.

    Raises:
        ValueError: Naming how many.
    """
    if "%json" in lark:
        # schemas inside are not taken apart
        plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), lark)
        if '"allOf"' in plain or '"$ref"' in plain:
            _refuse("grammar", sum(plain.count(f'"{name}"') for name in _EXPRESSIONS))
    _refuse("grammar", _LITERAL.sub("", lark).count("&") + 1)


def _refuse(name: str, count: int) -> None:
    if count > MOST:
        raise ValueError(
            f"{name} cannot be followed: a value has to match {count} expressions at once (allOf, $ref and & intersect "
            f"them), and more than {MOST} may take for ever: merge or drop some"
        )


def _matched(schema: Any, root: Any, known: dict[str, Counter[str]]) -> Counter[str]:
    """Expressions that a value has to match at most, by the name of its property; "" for the schema's own value."""
    if not isinstance(schema, Mapping):
        return Counter()
    most = Counter({"": sum(name in schema for name in _EXPRESSIONS)})
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str):
            most += _referred(value, root, known)
        elif keyword == "allOf" and isinstance(value, list):
            for part in value:
                most += _matched(part, root, known)
    inside: Counter[str] = Counter()
    for keyword, value in schema.items():
        if keyword in ("anyOf", "oneOf") and isinstance(value, list):
            branches: Counter[str] = Counter()
            for part in value:
                branches |= _matched(part, root, known)
            most += branches
        elif keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
            for name, part in value.items():
                _raise_to(inside, _named(name if keyword == "properties" else _ANY, _matched(part, root, known)))
        elif keyword == "additionalProperties":
            _raise_to(inside, _named(_ANY, _matched(value, root, known)))
        elif keyword in ("$defs", "definitions"):
            # counted where they are referred to
            continue
        elif keyword not in ("allOf", "anyOf", "oneOf", "const", "enum"):
            for part in value if isinstance(value, list) else [value]:
                _raise_to(inside, _named("[]", _matched(part, root, known)))
    return most + inside


def _raise_to(most: Counter[str], counts: Counter[str]) -> None:
    """As `most |= counts`, which would look at all that is in `most` for each property."""
    for name, count in counts.items():
        most[name] = max(most[name], count)


def _named(name: str, counts: Counter[str]) -> Counter[str]:
    named = Counter({each: count for each, count in counts.items() if each})
    return named | Counter({name: counts[""]})


def _referred(pointer: str, root: Any, known: dict[str, Counter[str]]) -> Counter[str]:
    if pointer not in known:
        # what is being counted already holds itself
        known[pointer] = Counter()
        target = root
        for key in pointer.removeprefix("#").split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        known[pointer] = _matched(target, root, known)
    return known[pointer]
