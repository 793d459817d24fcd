"""Fields that say what an answer has to be: OpenAI's `response_format`, and vLLM's spellings of the same."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Spec
from sigma0.serve.api.fields import FILLED, Closed, Settings, Text

FilledText = Annotated[Text, Field(min_length=1)]
SchemaField = Settings | FilledText
Choices = Annotated[list[FilledText], FILLED]


class TextFormat(Closed):
    """Any text.

    Attributes:
        type: Which format it is.
    """

    type: Literal["text"]


class JsonObjectFormat(Closed):
    """Any JSON object.

    Attributes:
        type: Which format it is.
    """

    type: Literal["json_object"]


class NamedSchema(Closed):
    """A JSON Schema with a name.

    Attributes:
        name: Without effect.
        description: Without effect: it is not shown to the model.
        json_schema: The schema, as `schema`.
        strict: Whether a keyword that cannot be enforced is refused, as without this field; false ignores it.
    """

    name: Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")]
    description: Text | None = None
    json_schema: Annotated[Settings, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Closed):
    """JSON that a schema allows.

    Attributes:
        type: Which format it is.
        json_schema: The schema.
    """

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Closed):
    """What an answer has to be, as vLLM's object; one of its fields at most.

    Attributes:
        json_schema: A JSON Schema, as an object or as JSON text, as `json`.
        regex: A regular expression.
        choice: Texts.
        grammar: A grammar, in Lark's notation or in EBNF.
        json_object: Any JSON object.
    """

    json_schema: Annotated[SchemaField | None, Field(alias="json")] = None
    regex: FilledText | None = None
    choice: Choices | None = None
    grammar: FilledText | None = None
    json_object: bool | None = None

    def spec(self) -> Spec | None:
        """What the answer has to be; None where no field says it.

        Raises:
            ValueError: For two of them, or one that is none.
        """
        fields = {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        given = _one(fields)
        return None if given is None else _spec(*given)


class StructuredFields(Closed):
    """The fields of a request of which at most one says what the answer has to be.

    Attributes:
        response_format: As with OpenAI.
        guided_json: A JSON Schema, as an object or as JSON text; here and below as vLLM spells it.
        guided_regex: A regular expression that the answer matches.
        guided_choice: Texts of which the answer is one.
        guided_grammar: A grammar of the answer, in Lark's notation or in EBNF.
        grammar: The same.
        structured_outputs: All of these as one object.
    """

    response_format: ResponseFormat | None = None
    guided_json: SchemaField | None = None
    guided_regex: FilledText | None = None
    guided_choice: Choices | None = None
    guided_grammar: FilledText | None = None
    grammar: FilledText | None = None
    structured_outputs: StructuredOutputs | None = None

    def structure(self) -> tuple[str, Spec] | None:
        """What the answer has to be, with the name of the field that says it; None where none does.

        Raises:
            ValueError: For two fields, or one that is wrong, named in the message.
        """
        kind = None if self.response_format is None or self.response_format.type == "text" else self.response_format
        inside = self.structured_outputs.spec() if self.structured_outputs is not None else None
        fields = {
            "response_format": kind,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
            "grammar": self.grammar,
            "structured_outputs": inside,
        }
        given = _one(fields)
        if given is None:
            return None
        name, value = given
        return name, value if isinstance(value, Spec) else _spec(name.removeprefix("guided_"), value)


def _one(fields: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The field that is given, with its name."""
    given = [(name, value) for name, value in fields.items() if value is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise ValueError(f"{names} exclude each other: an answer follows one of them")
    return given[0] if given else None


def _spec(kind: str, value: Any) -> Spec:
    match kind:
        case "response_format" if value.type == "json_schema":
            schema = value.json_schema
            return JsonSchema.of(schema.json_schema, strict=schema.strict is not False)
        case "response_format" | "json_object":
            return JsonObject()
        case "json":
            return JsonSchema.of(value)
        case "regex":
            return Regex(value)
        case "choice":
            return Choice(tuple(value))
    return Grammar(value)
