"""Fields that say what an answer has to be: OpenAI's `response_format`, and vLLM's spellings of the same."""

import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from sigma0.decode.detokenizer import eos_ids
from sigma0.decode.grammar.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Spec
from sigma0.decode.grammar.trial import GrammarTrial
from sigma0.decode.grammar.vocabulary import vocabulary_of
from sigma0.serve.api.errors import ApiError
from sigma0.serve.api.fields import FILLED, Closed, Settings, Text
from sigma0.serve.api.pools import BoundedPool
from sigma0.serve.engine.messages import Service

FilledText = Annotated[Text, Field(min_length=1)]
SchemaField = Settings | FilledText
# Grammars that are tried at once, which share the processors: a quick one never waits for a slow one to end.
AT_ONCE = 16
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


class GrammarChecks:
    """Tries the grammars of requests away from the engine and from the threads that read requests.

    Args:
        service: The engine.
        limit: Grammars that are tried, or wait for it, at most; more are refused as busy.
    """

    def __init__(self, service: Service, limit: int) -> None:
        self._service = service
        self._pool = BoundedPool("grammars", AT_ONCE, limit)
        self._trial: GrammarTrial | None = None
        self._lock = threading.Lock()

    async def check(self, name: str, spec: Spec, max_new_tokens: int) -> None:
        """Refuses a spec that the engine could not follow within a limit of tokens.

        Args:
            name: Of the field that holds it.
            spec: What the answer has to be.
            max_new_tokens: The least that one of the answers may have.

        Raises:
            ApiError: 400, naming the field.
            Busy: If too many wait.
        """
        try:
            least = await self._pool.run(self._least, spec)
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", name, "invalid_grammar") from error
        if least is not None and least > max_new_tokens:
            message = (
                f"{name}: the shortest answer that follows it takes {least} tokens, and {max_new_tokens} are allowed"
            )
            raise ApiError(400, f"{message}: raise max_tokens", name, "max_tokens_too_small")

    def _least(self, spec: Spec) -> int | None:
        model = self._service.model
        eos = eos_ids(model.generation_config.eos_token_id)
        vocabulary = vocabulary_of(self._service.tokenizer, int(model.config.vocab_size), eos)
        vocabulary.check_characters(spec)
        with self._lock:
            self._trial = self._trial or vocabulary.trial()
        return self._trial.least(spec)

    def close(self) -> None:
        """Ends its threads and its process."""
        self._pool.close()
        if self._trial is not None:
            self._trial.close()


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
