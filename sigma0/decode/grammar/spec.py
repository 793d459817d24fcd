"""What an answer has to be, as plain data: it can be hashed, compared and sent to another process."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Types of JSON Schema, and the characters without which no value of the type can be written.
_STRUCTURE = {"object": '{}":', "array": "[]", "string": '"', "boolean": "truefals", "null": "nul"}
# Keywords from which a schema that names no type has one.
_IMPLIES = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array", "pattern": "string"}


def _filled(name: str, text: str) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} has to be a text that is not empty, got {text!r:.80}")


@dataclass(frozen=True)
class JsonSchema:
    """JSON that a schema allows.

    Attributes:
        schema: The schema as JSON text: an object, or true.
        strict: Whether a keyword that cannot be enforced is refused; else it is ignored.

    Raises:
        ValueError: For a text that is no JSON, or no schema.
    """

    schema: str
    strict: bool = True

    def __post_init__(self) -> None:
        _filled("schema", self.schema)
        try:
            value = json.loads(self.schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"schema is no JSON: {error}") from error
        except ValueError as error:
            raise ValueError("schema holds a whole number of too many digits to be read") from error
        except RecursionError as error:
            raise ValueError("schema is nested too deep") from error
        if not isinstance(value, dict | bool):
            raise ValueError(f"schema has to be a JSON object, got {self.schema:.80}")
        if value is False:
            raise ValueError("schema is false, which no answer follows")

    @classmethod
    def of(cls, schema: Any, strict: bool = True) -> "JsonSchema":
        """A schema that is given as an object, as JSON text, or as a pydantic model.

        Raises:
            ValueError: For anything else.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, Mapping | bool):
            # the order of properties is that of the answer, so it is kept
            try:
                schema = json.dumps(schema)
            except (TypeError, ValueError) as error:
                raise ValueError(f"schema holds what is no JSON: {error}") from error
            except RecursionError as error:
                raise ValueError("schema is nested too deep") from error
        if not isinstance(schema, str):
            raise ValueError(f"schema takes an object, JSON text or a pydantic model, got {schema!r:.80}")
        return cls(schema, strict)

    def needs(self) -> frozenset[str]:
        """Characters without which some answer cannot be written.

        Raises:
            ValueError: For a schema that is nested too deep.
        """
        try:
            return frozenset("".join(_needed(json.loads(self.schema))))
        except RecursionError as error:
            raise ValueError("schema is nested too deep") from error


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""

    def needs(self) -> frozenset[str]:
        """Characters without which some answer cannot be written."""
        return frozenset(_STRUCTURE["object"])


@dataclass(frozen=True)
class Regex:
    """A text that matches a regular expression as a whole; without look-around and back-references.

    Attributes:
        pattern: The expression.
    """

    pattern: str

    def __post_init__(self) -> None:
        _filled("regex", self.pattern)

    def needs(self) -> frozenset[str]:
        """Characters without which some answer cannot be written: not known of an expression."""
        return frozenset()


@dataclass(frozen=True)
class Choice:
    """One of some texts.

    Attributes:
        choices: At least one, none of them empty.
    """

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("choice has to name at least one text")
        for text in self.choices:
            _filled("a choice", text)

    def needs(self) -> frozenset[str]:
        """Characters without which some answer cannot be written."""
        return frozenset("".join(self.choices))


@dataclass(frozen=True)
class Grammar:
    """A text of a context-free grammar.

    Attributes:
        grammar: In Lark's notation, or in the EBNF of llama.cpp (`root ::= ...`).
    """

    grammar: str

    def __post_init__(self) -> None:
        _filled("grammar", self.grammar)

    def needs(self) -> frozenset[str]:
        """Characters without which some answer cannot be written: not known of a grammar."""
        return frozenset()


# How a checkpoint's chat template writes a call of a tool, see `sigma0.decode.grammar.calls`.
CallStyle = Literal["hermes", "nanbeige"]


def parse_call_style(name: str | None) -> CallStyle | None:
    """A style by its name.

    Raises:
        ValueError: For a name that is none.
    """
    match name:
        case None | "hermes" | "nanbeige":
            return name
    raise ValueError(f"--tool-parser takes hermes or nanbeige, got {name!r:.40}")


@dataclass(frozen=True)
class Tool:
    """A tool that may be called.

    Attributes:
        name: Letters, digits, `_` and `-`.
        schema: Of its arguments, a JSON object.
    """

    name: str
    schema: JsonSchema


@dataclass(frozen=True)
class ToolCalls:
    """Calls of tools, each with arguments that the tool's schema allows; nothing follows them.

    Attributes:
        tools: At least one, each with another name.
        style: How calls are written.
        begins: What stands ahead of the first call: `call` nothing; `thought` text up to `</think>`; `text` any text,
            and then there may be no call at all.
        several: Whether there may be more than one call.
    """

    tools: tuple[Tool, ...]
    style: CallStyle = "hermes"
    begins: Literal["text", "call", "thought"] = "text"
    several: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if not names:
            raise ValueError("there has to be at least one tool")
        for name in names:
            _filled("a tool's name", name)
            if names.count(name) > 1:
                raise ValueError(f"two tools are called {name!r:.80}")

    def needs(self) -> frozenset[str]:
        """Characters without which some call cannot be written."""
        needed = {*"<tool_call></tool_call>\n", *("</think>" if self.begins == "thought" else "")}
        needed |= {*('{"name": "", "arguments": }' if self.style == "hermes" else "<function=></function>")}
        for tool in self.tools:
            needed |= {*tool.name, *(tool.schema.needs() if self.style == "hermes" else "")}
        return frozenset(needed)


Spec = JsonSchema | JsonObject | Regex | Choice | Grammar | ToolCalls


def parse_spec(
    schema: Any = None, regex: str | None = None, choice: Sequence[str] | None = None, grammar: str | None = None
) -> Spec | None:
    """What an answer has to be, of which at most one kind is given; None where none is.

    Args:
        schema: As `JsonSchema.of` takes it.
        regex: Of `Regex`.
        choice: Of `Choice`.
        grammar: Of `Grammar`.

    Raises:
        ValueError: For two of them, or one that is none.
    """
    given = {"schema": schema, "regex": regex, "choice": choice, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude each other: an answer follows one of them")
    if schema is not None:
        return JsonSchema.of(schema)
    if regex is not None:
        return Regex(regex)
    if choice is not None:
        if isinstance(choice, str):
            raise ValueError(f"choice takes a list of texts, got the text {choice!r:.80}")
        return Choice(tuple(choice))
    return None if grammar is None else Grammar(grammar)


def _needed(schema: Any) -> Iterator[str]:
    """Characters of the values that a schema and those inside of it describe."""
    if not isinstance(schema, dict):
        return
    # what is no schema here is refused where it is compiled
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        for value in values if isinstance(values, list) else []:
            yield json.dumps(value, ensure_ascii=False)
        return
    types = schema.get("type", [kind for keyword, kind in _IMPLIES.items() if keyword in schema])
    for kind in types if isinstance(types, list) else [types]:
        yield _STRUCTURE.get(kind, "") if isinstance(kind, str) else ""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        yield "".join(json.dumps(name, ensure_ascii=False) for name in properties)
        yield "," * (len(properties) > 1)
    for keyword, value in schema.items():
        if keyword in ("properties", "$defs", "definitions", "patternProperties"):
            inside = list(value.values()) if isinstance(value, dict) else []
        else:
            inside = value if isinstance(value, list) else [value]
        for part in inside:
            yield from _needed(part)
