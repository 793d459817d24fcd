"""Calls of tools as a grammar: text, then calls as a checkpoint's chat template writes them, with arguments by schema.

`hermes`, of Qwen and others, writes a call as JSON, on a line of its own between two tags:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

`nanbeige`, of Nanbeige 4.2 (and Qwen3-Coder), writes each argument between tags, texts as they are, the rest as JSON:

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sigma0.decode.grammar.spec import Tool, ToolCalls

OPEN, CLOSE, THOUGHT = "<tool_call>", "</tool_call>", "</think>"
END_OF_VALUE = "\n</parameter>"
# Without effect on what a value may be.
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_OF_ARGUMENTS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})
_INTEGER, _NUMBER = re.compile(r"-?(0|[1-9]\d*)"), re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ANY_TEXT = r"/(?s:.*)/"
# Characters of all schemas in a grammar, definitions written anew for each argument that refers to some.
_MOST = 2**21
# A text that ends where its line does.
_LINE = re.compile(r"[^\n]+")


@dataclass(frozen=True)
class Parameter:
    """An argument of a tool in `nanbeige`'s notation.

    Attributes:
        name: Its name.
        required: Whether it has to be there.
        schema: Of its value, with the definitions of the whole.
        kinds: Types that it may have where it is written as plain text, `string` among them; None where it is JSON.
        choices: The only texts that it may be; empty for any.
        length: Characters of a text, at least and at most; None for no limit.
    """

    name: str
    required: bool
    schema: Mapping[str, Any]
    kinds: frozenset[str] | None
    choices: tuple[str, ...] = ()
    length: tuple[int, int | None] = (0, None)

    def json(self, text: str) -> str:
        """What stands between the tags, as JSON; a number keeps its digits, however many."""
        if (
            self.kinds is None
            or ("null" in self.kinds and text == "null")
            or ("boolean" in self.kinds and text in ("true", "false"))
            or ("integer" in self.kinds and _INTEGER.fullmatch(text))
            or ("number" in self.kinds and _NUMBER.fullmatch(text))
        ):
            return text
        return json.dumps(text, ensure_ascii=False)


def parameters_of(tool: Tool) -> tuple[Parameter, ...]:
    """The arguments of a tool, in the order in which they are written.

    Raises:
        ValueError: For a schema that cannot be held in `nanbeige`'s notation.
    """
    root = json.loads(tool.schema.schema)
    name, strict = f"the parameters of {tool.name!r}", tool.schema.strict
    if root is True:
        return ()
    properties, required = root.get("properties", {}), root.get("required", [])
    if root.get("type", "object") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError(f"{name} have to be an object with properties")
    more = sorted(set(root) - _OF_ARGUMENTS)
    if more and strict:
        raise ValueError(
            f"{name} cannot be held to {more[0]!r} as this model writes calls: drop it, or set strict=false"
        )
    if missing := [item for item in required if item not in properties]:
        raise ValueError(f"{name} require {missing[0]!r:.80}, which is not among the properties")
    for item in properties:
        if not item or re.search(r"[<>\s]", item):
            raise ValueError(f"{name} have the name {item!r:.80}, which this model cannot write: no spaces, < and >")
    needed = set(required)
    return tuple(_parameter(item, item in needed, current, root) for item, current in properties.items())


def lark_of(calls: ToolCalls, layout: Mapping[str, Any]) -> str:
    """The grammar, in llguidance's dialect of Lark.

    Args:
        calls: What may be called.
        layout: Of JSON, as llguidance takes it.

    Raises:
        ValueError: For a schema that cannot be held in this notation.
    """
    rules = _Rules(layout)
    bodies = [rules.body(calls, tool, number) for number, tool in enumerate(calls.tools)]
    more = ' ("\\n" call)*' if calls.several else ""
    lines = {
        # free text ends where a tag begins, so both are read at once
        "text": f"start: TEXT | ahead rest{more}\nahead[suffix={_quoted(OPEN)}]: {_ANY_TEXT}\nTEXT: {_without(OPEN)}",
        "call": f"start: call{more}",
        "thought": f'start: ahead "\\n\\n" call{more}\nahead[suffix={_quoted(THOUGHT)}]: {_ANY_TEXT}',
    }
    start = [lines[calls.begins], f"call: {_quoted(OPEN)} rest", f"rest: {' | '.join(bodies)}"]
    return "\n".join([*start, *rules.lines])


class _Rules:
    """The rules of a grammar that were written so far."""

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self._layout = layout
        self._size = 0
        self.lines: list[str] = []

    def body(self, calls: ToolCalls, tool: Tool, number: int) -> str:
        """The name of the rule for a call of a tool, after its first tag."""
        name = f"call_{number}"
        if calls.style == "hermes":
            arguments = self._json(f"arguments_{number}", json.loads(tool.schema.schema), tool.schema.strict)
            head, tail = f'\n{{"name": "{tool.name}", "arguments": ', f"}}\n{CLOSE}"
            self.lines.append(f"{name}: {_quoted(head)} {arguments} {_quoted(tail)}")
            return name
        parts = []
        for place, parameter in enumerate(parameters_of(tool)):
            rule = f"parameter_{number}_{place}"
            value = self._value(f"{number}_{place}", parameter, tool.schema.strict)
            self.lines.append(f'{rule}: {_quoted(f"<parameter={parameter.name}>" + chr(10))} {value} "\\n"')
            parts.append(rule if parameter.required else f"{rule}?")
        head, tail = f"\n<function={tool.name}>\n", f"</function>\n{CLOSE}"
        self.lines.append(" ".join([f"{name}: {_quoted(head)}", *parts, _quoted(tail)]))
        return name

    def _value(self, place: str, parameter: Parameter, strict: bool) -> str:
        """A value with the tag after it."""
        end = _quoted(END_OF_VALUE)
        if parameter.kinds is None:
            return f"{self._json(f'value_{place}', parameter.schema, strict)} {end}"
        if parameter.choices:
            return f"({' | '.join(map(_quoted, parameter.choices))}) {end}"
        least, most = parameter.length
        sized = _ANY_TEXT if (least, most) == (0, None) else f"/(?s:.{{{least},{'' if most is None else most}}})/"
        self.lines += [
            f"VALUE_{place}: {sized} & {_without(END_OF_VALUE)}",
            f"text_{place}[lazy]: VALUE_{place} {end}",
        ]
        return f"text_{place}"

    def _json(self, name: str, schema: Any, strict: bool) -> str:
        """The name of the rule for JSON of a schema."""
        schema = {} if schema is True else dict(schema)
        schema["x-guidance"] = {**self._layout, **({} if strict else {"lenient": True})}
        text = json.dumps(schema)
        self._size += len(text)
        if self._size > _MOST:
            raise ValueError(
                f"the schemas of the tools take over {_MOST} characters with the definitions that each argument refers "
                "to: give fewer arguments, or smaller definitions"
            )
        self.lines.append(f"{name}: %json {text}")
        return name


def _parameter(name: str, required: bool, schema: Any, root: Mapping[str, Any]) -> Parameter:
    current = schema if isinstance(schema, Mapping) else {}
    parts = ("$defs", "definitions") if '"$ref"' in json.dumps(current) else ()
    defined = {key: root[key] for key in parts if key in root}
    whole = {**defined, **current} if schema is not False else {"not": {}}
    rules = set(current) - _NOTES
    if rules and rules <= {"type", "minLength", "maxLength"} and current.get("type") == "string":
        length = current.get("minLength", 0), current.get("maxLength")
        if all(type(item) is int and 0 <= item <= 10_000 for item in length if item is not None):
            return Parameter(name, required, whole, frozenset({"string"}), length=length)
    values = current.get("enum", [current["const"]] if "const" in current else None)
    if rules and rules <= {"type", "enum", "const"} and current.get("type", "string") == "string" and values:
        lines = all(isinstance(item, str) and _LINE.fullmatch(item) for item in values)
        if len(rules & {"enum", "const"}) == 1 and lines:
            return Parameter(name, required, whole, frozenset({"string"}), tuple(dict.fromkeys(values)))
    return Parameter(name, required, whole, _plain_kinds(current))


def _plain_kinds(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types of a value that nothing else is asked of, `string` among them; else None."""
    rules = set(schema) - _NOTES
    if rules == {"anyOf"} and isinstance(schema["anyOf"], list):
        kinds: set[str] = set()
        for branch in schema["anyOf"]:
            if not isinstance(branch, Mapping) or set(branch) - _NOTES != {"type"}:
                return None
            kinds |= set(_types(branch))
    elif rules == {"type"}:
        kinds = set(_types(schema))
    else:
        return None
    return frozenset(kinds) if "string" in kinds and kinds <= _SCALARS else None


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema["type"]
    # what is no type is refused where it is compiled
    return [str(item) for item in types] if isinstance(types, list) else [str(types)]


def _without(mark: str) -> str:
    """Any text that does not hold a mark."""
    escaped = mark.replace("\n", "\\n").replace("/", "\\/")
    return f"{_ANY_TEXT} & ~/(?s:.*){escaped}(?s:.*)/"


def _quoted(text: str) -> str:
    """A text as Lark's literal."""
    return json.dumps(text, ensure_ascii=False)
