"""Fields of requests: their types, messages, and the OpenAI fields that this server does not support.

Nothing is accepted and ignored. An OpenAI field is in one of three groups: it works; it names the user or the purpose
and has no effect on the answer (`NO_EFFECT`); or it is for a feature that this server has not (`UNSUPPORTED`), and then
only its empty values are accepted.
"""

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

# fields of an object at most: each unknown one would be an error of its own
_MAX_NAMES = 64
_MAX_DEPTH = 64
# What Python's reader of JSON refuses, since its time grows with the square of the digits.
LONG_NUMBER = f"a whole number of over {sys.get_int_max_str_digits()} digits"


def _is_text(value: Any) -> Any:
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return value


# ahead of bounds of length, which cannot be counted of what is no text
Text = Annotated[str, BeforeValidator(_is_text)]


def _is_false(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


# not Literal[False], which 0 equals
No = Annotated[bool, AfterValidator(_is_false), WithJsonSchema({"type": "boolean", "const": False})]
Settings = Annotated[dict[str, Any], Field(max_length=_MAX_NAMES)]
NoMembers = Annotated[list[Any], Field(max_length=0)]
# one error is sent; one for each of a million members would fill the memory
FIRST_ERROR, FILLED = Field(fail_fast=True), Field(min_length=1, fail_fast=True)

# Fields of requests, with the message for any value that is not empty.
UNSUPPORTED = {
    "audio": "this server writes text alone: leave it out",
    "best_of": "this server returns all that it writes: leave it out, or set it to n",
    "function_call": "this server takes tools instead: send tool_choice, and leave it out",
    "functions": "this server takes tools instead: send tools, and leave it out",
    "modalities": 'this server writes text alone: leave it out, or send ["text"]',
    "moderation": "this server does not moderate: leave it out",
    "prediction": "this server takes no predicted output: leave it out",
    "prompt_cache_options": 'this server caches prompts as room allows: leave it out, or send {"mode": "implicit"}',
    "prompt_cache_retention": 'this server caches prompts as room allows: leave it out, or send "in_memory"',
    "service_tier": 'this server has one tier: leave it out, or send "auto" or "default"',
    "store": "this server stores no answers: leave it out",
    "suffix": "this server continues texts, and fills no gaps: leave it out",
    "verbosity": 'this server does not steer the length of answers: leave it out, or send "medium"',
    "web_search_options": "this server does not search: leave it out",
}
# They name the user or the purpose.
NO_EFFECT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
# Fields of messages that chat templates do not show to the model.
UNSUPPORTED_IN_MESSAGES = {
    "annotations": "annotations are not shown to the model: leave them out",
    "audio": "the model reads text alone: leave it out",
    "function_call": "this server takes tools instead: send tool_calls, and leave it out",
    "name": "names are not shown to the model: write it into content",
    "refusal": "refusals are not shown to the model: write it into content",
}
# OpenAI roles that this server does not support
UNSUPPORTED_ROLES = ("function",)


class Closed(BaseModel):
    """An object that refuses unknown fields."""

    # strict: "1" is no number and 1 no boolean, as with OpenAI
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_NAMES:
            raise ValueError(f"holds over {_MAX_NAMES} fields")
        return value


class TextPart(Closed):
    """A part of a message.

    Attributes:
        type: Only text can be read.
        text: The text.
    """

    type: Literal["text"]
    text: Text


class CalledFunction(Closed):
    """A function that was called.

    Attributes:
        name: Its name.
        arguments: A JSON object as text.
    """

    name: Annotated[Text, Field(min_length=1, max_length=64)]
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        arguments_of(value)
        return value


class CallField(Closed):
    """A call that the assistant has made.

    Attributes:
        id: Which `tool_call_id` answers.
        type: Only functions can be called.
        function: What was called.
    """

    id: Annotated[Text, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def plain_json(value: Any) -> Any:
    """JSON that is shown to the model, as it is.

    Raises:
        ValueError: For a text that holds half of a surrogate pair, or what is nested too deep.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [entry for entry in level if isinstance(entry, dict | list)]
        level = [item for entry in nested for item in (entry.values() if isinstance(entry, dict) else entry)]
        if not level:
            _is_text(json.dumps(value, ensure_ascii=False))
            return value
    raise ValueError(f"is nested too deep: over {_MAX_DEPTH} levels")


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call that was made before; "" for none.

    Raises:
        ValueError: For a text that is no JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    except json.JSONDecodeError as error:
        raise ValueError("has to be a JSON object") from error
    except ValueError as error:
        raise ValueError(f"holds {LONG_NUMBER}") from error
    if not isinstance(arguments, dict):
        raise ValueError("has to be a JSON object")
    plain_json(arguments)
    return arguments


class ChatMessage(Closed):
    """A turn of a chat.

    Attributes:
        role: `developer` is passed to chat templates as `system`, the name that they know.
        content: The text; parts are joined by line breaks. None beside calls.
        name: Not shown to the model and so refused, as are all other fields; their empty values, as in an answer that
            is sent back, are accepted.
        tool_calls: What the assistant has called.
        tool_call_id: Of the call that a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[CallField], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(None, validate_default=True)
    content: Text | Annotated[list[TextPart], FIRST_ERROR] | None = Field(None, validate_default=True)
    name: None = None
    annotations: NoMembers | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None

    @field_validator("tool_calls")
    @classmethod
    def _are_the_assistants(cls, value: list[CallField] | None, info: ValidationInfo) -> list[CallField] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise ValueError("go with the role assistant: leave them out")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _is_a_tools(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "role" in info.data and (value is None) == (info.data["role"] == "tool"):
            raise ValueError("goes with the role tool, and with no other")
        return value

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("is required: a string or a list of text parts")
        return value

    def to_dict(self) -> dict[str, Any]:
        """As chat templates take it; arguments of calls are objects."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class StreamOptions(Closed):
    """Options of a stream.

    Attributes:
        include_usage: Whether the last chunk holds the usage.
        include_obfuscation: Chunks are not padded.
    """

    include_usage: bool | None = None
    include_obfuscation: No | None = None


class CacheOptions(Closed):
    """Options of the prompt cache.

    Attributes:
        mode: Prompts are always cached.
    """

    mode: Literal["implicit"] | None = None


class ChatFields(Closed):
    """OpenAI's chat fields that do not work here; of those in `UNSUPPORTED`, only the empty values.

    Attributes:
        metadata: Without effect.
        safety_identifier: Without effect.
        prompt_cache_key: Without effect: what is shared depends on prompts and `cache_salt` alone.
    """

    metadata: Settings | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    audio: None = None
    function_call: Literal["none", "auto"] | None = None
    functions: NoMembers | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1, fail_fast=True)] | None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
