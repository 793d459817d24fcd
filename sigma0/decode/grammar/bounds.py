"""What a text that says what an answer has to be may ask of the engine, whose own bounds are not enough.

Its time grows exponentially with the number of expressions that a text has to match at once: twelve as
`(a|b|ab|ba)*c.{8}1` take half a second, and each further one four times as long. Its stack grows with the length of a
chain of rules or references, and what requires itself breaks it at the first id.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sigma0.decode.grammar.spec import Choice, Grammar, JsonSchema, Regex, Spec, ToolCalls

# Characters of a regular expression, and of any other text; texts of a choice; rules of a grammar, references of a
# schema; characters of the shortest answer.
REGEX, TEXT, CHOICES, RULES, LEAST = 2**14, 2**18, 20_000, 1_000, 2**16
# Key of a schema that sets the engine.
_ENGINE = "x-guidance"
# What one token may add to the way to an end, at least and at most.
_NEAR, _REACH = 16, 256
# Expressions that a value may have to match at once.
MOST = 8
_EXPRESSIONS = ("pattern", "format")
# Stands for properties whose names are not listed; no other name holds a NUL.
_ANY = "\0"
# Before a grammar: what all its texts begin with is written in the tokens of the model's choice, not of the engine's.
OWN_TOKENS = '%llguidance {"no_forcing": true}\n'
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_RULE = re.compile(r"^\s*[?!]*[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\])?\s*(?:\{[^}\n]*\})?\s*:", re.MULTILINE)
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def check_spec(spec: Spec) -> int:
    """Refuses what is too large for an engine, or what no answer of finite length follows.

    Returns:
        Tokens that one token of an answer may add to the shortest way to its end, about.

    Raises:
        ValueError: Naming the limit.
    """
    match spec:
        case JsonSchema():
            return check_schema(spec.schema)
        case ToolCalls():
            return max(check_schema(tool.schema.schema) for tool in spec.tools)
        case Regex():
            _at_most("regex", len(spec.pattern), REGEX, "characters")
            return _REACH
        case Choice():
            _at_most("choice", len(spec.choices), CHOICES, "texts")
            _at_most("choice", sum(map(len, spec.choices)), TEXT, "characters")
        case Grammar():
            _at_most("grammar", len(spec.grammar), TEXT, "characters")
            if "%llguidance" in _LITERAL.sub("", spec.grammar.removeprefix(OWN_TOKENS)):
                raise ValueError("grammar may not set the engine: leave %llguidance out")
            return _REACH
    return _NEAR


def check_schema(text: str) -> int:
    """Refuses a schema, as JSON text, that the engine cannot bound, or that requires itself.

    Returns:
        Characters of the shortest value of that of its parts where it is longest, within limits.

    Raises:
        ValueError: For keys of the engine, too large a schema, one by which a value has to match too many expressions,
            or one that no value of finite length follows.
    """
    _at_most("schema", len(text), TEXT, "characters")
    root = json.loads(text)
    try:
        matched = _matched(root, root, {})
        # properties of any name intersect those of each name
        _refuse("schema", matched.pop(_ANY, 0) + max(matched.values(), default=0))
        sizes = _Sizes(root)
        sizes.solve()
    except RecursionError as error:
        raise ValueError("schema is nested too deep") from error
    if sizes.least == math.inf:
        raise ValueError(
            "schema requires itself: no answer of finite length follows it: make one of the parts optional"
        )
    if sizes.least > LEAST:
        raise ValueError(f"schema has no answer of under {LEAST} characters: ask for less")
    return int(min(max(sizes.greatest, _NEAR), _REACH))


def check_grammar(lark: str) -> None:
    """Refuses a grammar in Lark's notation that is too large, sets the engine, or intersects too many expressions.

    Raises:
        ValueError: Naming how many.
    """
    bare = _LITERAL.sub("", lark)
    _at_most("grammar", len(_RULE.findall(bare)), RULES, "rules")
    if "%json" in lark:
        # schemas inside are not taken apart
        plain = _ESCAPED.sub(lambda result: chr(int(result[1], 16)), lark)
        if f'"{_ENGINE}"' in plain:
            raise ValueError(f"grammar may not set the engine: leave {_ENGINE} out")
        if '"allOf"' in plain or '"$ref"' in plain:
            _refuse("grammar", sum(plain.count(f'"{name}"') for name in _EXPRESSIONS))
    _refuse("grammar", bare.count("&") + 1)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"{name} takes at most {most} {what}, got {count}")


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
    named = Counter({item: count for item, count in counts.items() if item})
    return named | Counter({name: counts[""]})


def _referred(pointer: str, root: Any, known: dict[str, Counter[str]]) -> Counter[str]:
    if pointer not in known:
        # what is being counted already holds itself
        known[pointer] = Counter()
        known[pointer] = _matched(_target(pointer, root), root, known)
    return known[pointer]


def _target(pointer: str, root: Any) -> Any:
    """What a reference of a schema refers to; None where there is nothing."""
    target = root
    for key in pointer.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


class _Sizes:
    """Characters of the shortest values that a schema and its parts allow, from below; infinite for none.

    Args:
        root: The schema.

    Attributes:
        least: Of the schema.
        greatest: The greatest of a part that has any.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # what holds itself has no shortest value until one of its parts has one
        self._known: dict[str, float] = {}
        self._waiting: list[str] = []
        self.least: float = math.inf
        self.greatest = 0.0

    def solve(self) -> None:
        """Looks again until no reference gets shorter.

        Raises:
            ValueError: For keys of the engine, or references that lead on too far.
        """
        self.least = self._of(self._root)
        changed = True
        while changed:
            changed = False
            _at_most("schema", len(self._known), RULES, "references")
            for pointer in list(self._known):
                size = self._of(_target(pointer, self._root))
                changed = changed or size < self._known[pointer]
                self._known[pointer] = min(size, self._known[pointer])
            while self._waiting:
                self._known.setdefault(self._waiting.pop(), math.inf)
                changed = True
        self.least = self._of(self._root)

    def _of(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return math.inf if schema is False else 1
        if _ENGINE in schema:
            raise ValueError(f"schema may not set the engine: leave {_ENGINE} out")
        size = self._own(schema)
        for part in schema.get("allOf", ()) if isinstance(schema.get("allOf"), list) else ():
            size = max(size, self._of(part))
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                size = max(size, min(map(self._of, parts)))
        if isinstance(pointer := schema.get("$ref"), str):
            if pointer not in self._known:
                self._waiting.append(pointer)
            size = max(size, self._known.get(pointer, math.inf))
        if size < math.inf:
            self.greatest = max(self.greatest, size)
        return size

    def _own(self, schema: Mapping[str, Any]) -> float:
        """Without what is referred to or combined."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        sizes = {name: self._of(part) for name, part in properties.items()}
        inside = [self._of(part) for part in self._parts(schema)]
        if "const" in schema:
            return len(json.dumps(schema["const"], ensure_ascii=False))
        if isinstance(values := schema.get("enum"), list):
            return min((len(json.dumps(value, ensure_ascii=False)) for value in values), default=math.inf)
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        least: list[float] = []
        for kind in kinds:
            if kind == "object":
                required = schema.get("required")
                names = [item for item in required if isinstance(item, str)] if isinstance(required, list) else []
                item = [len(json.dumps(name, ensure_ascii=False)) + 4 + sizes.get(name, 1) for name in names]
                least.append(2 + max(0, sum(item) - 2))
            elif kind == "array":
                count = schema.get("minItems")
                count = count if isinstance(count, int) else 0
                first = inside[: len(schema["prefixItems"])] if isinstance(schema.get("prefixItems"), list) else []
                more = self._of(schema.get("items", True)) if count > len(first) else 0
                item = [*first[:count], *([more] if count > len(first) else [])]
                rest = max(0, count - len(first) - 1)
                least.append(2 + sum(item) + (rest * more if rest else 0) + 2 * max(0, count - 1))
            elif kind == "string":
                if "pattern" in schema or "format" in schema:
                    # how long is not known
                    self.greatest = math.inf
                length = schema.get("minLength")
                least.append(2 + (length if isinstance(length, int) else 0))
            else:
                least.append(4 if kind in ("boolean", "null") else 1)
        return min(least, default=1)

    @staticmethod
    def _parts(schema: Mapping[str, Any]) -> list[Any]:
        """Schemas of the values inside, those of `prefixItems` first."""
        parts = list(schema["prefixItems"]) if isinstance(schema.get("prefixItems"), list) else []
        for keyword in ("items", "additionalProperties"):
            parts += [schema[keyword]] if keyword in schema else []
        patterns = schema.get("patternProperties")
        return [*parts, *(patterns.values() if isinstance(patterns, Mapping) else ())]
