"""What clients may ask: OpenAI's chat and completion requests, and what `sigma0` adds to them."""

import logging
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from sigma0.effort import Effort
from sigma0.ladder import Budget
from sigma0.settings import ExitConfig

logger = logging.getLogger(__name__)
MAX_STOPS = 4
# OpenAI's own default of completions; a chat may go on to the end of the context
COMPLETION_TOKENS = 16
_NAMES_LOGGED = 16
_MAX_SETTING = 10**6
# below it logits may be divided up to infinity, of which nothing can be drawn; a device that tries is lost to all
_LEAST_TEMPERATURE = 1e-6
# of an object that takes no others than its own: each of the others is a complaint
_MAX_NAMES = 64


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return value


def _likeliest(value: float) -> float:
    return value if value >= _LEAST_TEMPERATURE else 0.0


Text = Annotated[str, AfterValidator(_is_text)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Settings = Annotated[dict[str, Any], Field(max_length=_MAX_NAMES)]
# strict: "1" is no number and 1 no truth value, as OpenAI has it
_STRICT = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)
# one complaint is told; one for each of a million members would fill the memory
_FIRST_ERROR, _FILLED = Field(fail_fast=True), Field(min_length=1, fail_fast=True)


class _Closed(BaseModel):
    """An object that takes no fields but its own."""

    model_config = _STRICT | ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_NAMES:
            raise ValueError(f"holds over {_MAX_NAMES} fields")
        return value


class TextPart(_Closed):
    """A part of a message.

    Attributes:
        type: Only text can be read.
        text: It.
    """

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """A turn of a chat; fields beside these two are not shown to the model.

    Attributes:
        role: Who speaks; `developer` is shown as `system`, the name that chat templates know.
        content: What is said; parts are joined by line breaks.
    """

    model_config = _STRICT | ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], _FIRST_ERROR]

    def to_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """How a stream is told.

    Attributes:
        include_usage: Whether a last chunk tells the usage.
    """

    model_config = _STRICT | ConfigDict(extra="ignore")

    include_usage: bool = False


_EXIT = TypeAdapter(ExitConfig)


class Sigma0Options(_Closed):
    """What this server can beyond OpenAI's protocol.

    Attributes:
        exit: An exit setting, as `sigma0.settings.ExitConfig` takes it; wins over `reasoning_effort`.
        ladder: Whether the server's ladder answers, or what goes up there; False: not even where the server routes.
        budget: Limits of the ladder, as `sigma0.ladder.Budget` takes them; the server's own hold as well.
        trail: Whether the ladder's decisions are sent with the response.
        sources: Texts that the answer may be grounded in, beside the prompt.
    """

    exit: Settings | None = None
    ladder: bool | Literal["token", "draft", "answer"] | None = None
    budget: Settings | None = None
    trail: bool = False
    sources: Annotated[list[Text], _FIRST_ERROR] = Field(default_factory=list)

    @field_validator("exit")
    @classmethod
    def _is_an_exit_setting(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            # not its constructor, which tells in one line what is wanted by field here
            _EXIT.validate_python(value)
            # counts of loops are held in 64 bits further in
            if any(isinstance(each, int | float) and abs(each) > _MAX_SETTING for each in value.values()):
                raise ValueError(f"holds a number over {_MAX_SETTING}")
        return value

    @field_validator("budget")
    @classmethod
    def _is_a_budget(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            Budget(**value)
        return value

    @property
    def limits(self) -> Budget | None:
        """The budget."""
        return None if self.budget is None else Budget(**self.budget)


class Request(BaseModel, ABC):
    """What both kinds of requests have.

    Fields that OpenAI has and this server has not are accepted, and have no effect; their names are logged.

    Attributes:
        model: Name of the served model.
        max_tokens: New tokens at most.
        max_completion_tokens: The same; wins.
        stop: Strings that end the text, which does not hold them.
        n: Choices for each prompt.
        seed: Of the draws; choice i has `seed` + i.
        temperature: 0, and what is under a millionth, takes the likeliest; None: as the checkpoint says, and 0 where it
            says nothing.
        top_p: None: as the checkpoint says, as are the next three.
        top_k: 0 for none.
        min_p: 0 for none.
        repetition_penalty: 1 for none.
        presence_penalty: Taken off the logits of ids that were written already.
        frequency_penalty: Likewise, for each time that they were.
        stream: Whether tokens are told as they come.
        stream_options: How.
        reasoning_effort: How long tokens loop, see `sigma0.effort`.
        user: Accepted, without effect.
        sigma0: What this server can beyond OpenAI's protocol.
    """

    model_config = _STRICT | ConfigDict(extra="allow")

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_likeliest)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    user: str | None = None
    sigma0: Sigma0Options | None = None

    @model_validator(mode="after")
    def _tell_what_has_no_effect(self) -> "Request":
        names = sorted(self.model_extra or {})
        if names:
            # names alone, cut: what stands under them, and whatever else a client sends as one, is not ours to log
            shown = ", ".join(repr(name[:40]) for name in names[:_NAMES_LOGGED])
            logger.info("fields without effect: %s%s", shown, " ..." if len(names) > _NAMES_LOGGED else "")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    @abstractmethod
    def told_logprobs(self) -> int | None:
        """Alternatives beside each token's log-probability; None where neither is asked for."""


class ChatRequest(Request):
    """The body of `POST /v1/chat/completions`; what it shares with completions stands in `Request`.

    Attributes:
        messages: A last one of the assistant is continued.
        logprobs: Whether log-probabilities are told.
        top_logprobs: Alternatives beside each; needs `logprobs`.
    """

    messages: Annotated[list[ChatMessage], _FILLED]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs=true")
        return value

    @property
    def told_logprobs(self) -> int | None:
        """Alternatives beside each token's log-probability; None where neither is asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request):
    """The body of `POST /v1/completions`; what it shares with chats stands in `Request`.

    Attributes:
        prompt: Texts or ids, one or several.
        logprobs: Alternatives beside each token's log-probability; None tells neither.
        echo: Not offered.
    """

    prompt: (
        Text
        | Annotated[list[Text], _FILLED]
        | Annotated[list[Id], _FILLED]
        | Annotated[list[Annotated[list[Id], _FILLED]], _FILLED]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @field_validator("echo")
    @classmethod
    def _is_not_offered(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("this server does not send the prompt back: leave echo out")
        return value

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, each a text or ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        found: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for part in self.prompt:
            if isinstance(part, int):
                ids.append(part)
            else:
                found.append(part if isinstance(part, str) else tuple(part))
        return (tuple(ids),) if ids else tuple(found)

    @property
    def told_logprobs(self) -> int | None:
        """Alternatives beside each token's log-probability; None where neither is asked for."""
        return self.logprobs
