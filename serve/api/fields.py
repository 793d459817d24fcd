"""Fields of requests: their types, messages, and what OpenAI has and this server has not.

Nothing is accepted and ignored. A field of OpenAI's is in one of three groups: it works; it says who asks or what for
and has no effect on the answer (`NO_EFFECT`); or it asks for what this server does not do (`UNSUPPORTED`), and then
only the values that ask for nothing are taken.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# of an object that takes no others than its own: each of the others is a complaint
_MAX_NAMES = 64


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return value


Text = Annotated[str, AfterValidator(_is_text)]
Settings = Annotated[dict[str, Any], Field(max_length=_MAX_NAMES)]
NoMembers = Annotated[list[Any], Field(max_length=0)]
# one complaint is told; one for each of a million members would fill the memory
FIRST_ERROR, FILLED = Field(fail_fast=True), Field(min_length=1, fail_fast=True)

# Of requests, with what is told of any value that asks for something.
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
    "response_format": 'this server does not constrain its answers: leave it out, or send {"type": "text"}',
    "service_tier": 'this server has one tier: leave it out, or send "auto" or "default"',
    "store": "this server stores no answers: leave it out",
    "suffix": "this server continues texts, and fills no gaps: leave it out",
    "tool_choice": "this server calls no tools: leave it out",
    "tools": "this server calls no tools: leave it out",
    "verbosity": 'this server does not steer the length of answers: leave it out, or send "medium"',
    "web_search_options": "this server does not search: leave it out",
}
# They say who asks, or what for. `parallel_tool_calls` speaks of tools alone, and those are refused.
NO_EFFECT = frozenset({"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"})
# Of messages: what the model would not be shown.
UNSUPPORTED_IN_MESSAGES = {
    "annotations": "annotations are not shown to the model: leave them out",
    "audio": "the model reads text alone: leave it out",
    "function_call": "this server calls no functions: leave it out",
    "name": "names are not shown to the model: write it into content",
    "refusal": "refusals are not shown to the model: write it into content",
    "tool_call_id": "this server calls no tools: leave it out",
    "tool_calls": "this server calls no tools: leave it out",
}
# roles that OpenAI has and this server has not
UNSUPPORTED_ROLES = ("tool", "function")


class Closed(BaseModel):
    """An object that takes no fields but its own."""

    # strict: "1" is no number and 1 no truth value, as OpenAI has it
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
        text: It.
    """

    type: Literal["text"]
    text: Text


class ChatMessage(Closed):
    """A turn of a chat.

    Attributes:
        role: Who speaks; `developer` is shown as `system`, the name that chat templates know.
        content: What is said; parts are joined by line breaks.
        name: Not shown to the model, and so refused, as are the others; where they are empty, as in an answer that is
            sent back, they are taken.
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
    """How a stream is told.

    Attributes:
        include_usage: Whether a last chunk tells the usage.
        include_obfuscation: Chunks are not padded.
    """

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Closed):
    """The format that every answer has.

    Attributes:
        type: Text.
    """

    type: Literal["text"]


class CacheOptions(Closed):
    """How prompts are cached anyway.

    Attributes:
        mode: Without being asked.
    """

    mode: Literal["implicit"] | None = None


class ChatFields(Closed):
    """Fields of OpenAI's chats that do not work here; of those in `UNSUPPORTED`, the values that ask for nothing.

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
    response_format: TextFormat | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: NoMembers | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None
