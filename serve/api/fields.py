"""Fields of requests: their types, messages, and the OpenAI fields that this server does not support.

Nothing is accepted and ignored. An OpenAI field is in one of three groups: it works; it names the user or the purpose
and has no effect on the answer (`NO_EFFECT`); or it is for a feature that this server has not (`UNSUPPORTED`), and then
only its empty values are accepted.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

# fields of an object at most: each unknown one would be an error of its own
_MAX_NAMES = 64


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return value


Text = Annotated[str, AfterValidator(_is_text)]


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
    "echo": "this server does not send the prompt back: leave it out",
    "function_call": "this server calls no functions: leave it out",
    "functions": "this server calls no functions: leave it out",
    "logit_bias": "this server does not bias logits: leave it out",
    "modalities": 'this server writes text alone: leave it out, or send ["text"]',
    "moderation": "this server does not moderate: leave it out",
    "prediction": "this server takes no predicted output: leave it out",
    "prompt_cache_options": 'this server caches prompts as room allows: leave it out, or send {"mode": "implicit"}',
    "prompt_cache_retention": 'this server caches prompts as room allows: leave it out, or send "in_memory"',
    "service_tier": 'this server has one tier: leave it out, or send "auto" or "default"',
    "store": "this server stores no answers: leave it out",
    "suffix": "this server continues texts, and fills no gaps: leave it out",
    "tool_choice": "this server calls no tools: leave it out",
    "tools": "this server calls no tools: leave it out",
    "verbosity": 'this server does not steer the length of answers: leave it out, or send "medium"',
    "web_search_options": "this server does not search: leave it out",
}
# They name the user or the purpose. `parallel_tool_calls` is about tools alone, and those are refused.
NO_EFFECT = frozenset({"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"})
# Fields of messages that chat templates do not show to the model.
UNSUPPORTED_IN_MESSAGES = {
    "annotations": "annotations are not shown to the model: leave them out",
    "audio": "the model reads text alone: leave it out",
    "function_call": "this server calls no functions: leave it out",
    "name": "names are not shown to the model: write it into content",
    "refusal": "refusals are not shown to the model: write it into content",
    "tool_call_id": "this server calls no tools: leave it out",
    "tool_calls": "this server calls no tools: leave it out",
}
# OpenAI roles that this server does not support
UNSUPPORTED_ROLES = ("tool", "function")


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


class ChatMessage(Closed):
    """A turn of a chat.

    Attributes:
        role: `developer` is passed to chat templates as `system`, the name that they know.
        content: The text; parts are joined by line breaks.
        name: Not shown to the model and so refused, as are all other fields; their empty values, as in an answer that
            is sent back, are accepted.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], FIRST_ERROR]
    name: None = None
    annotations: NoMembers | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_call_id: None = None
    tool_calls: NoMembers | None = None

    def to_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


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
    parallel_tool_calls: bool | None = None
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
    tool_choice: Literal["none", "auto"] | None = None
    tools: NoMembers | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
