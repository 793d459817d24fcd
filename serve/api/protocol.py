"""What clients may ask: OpenAI's chat and completion requests, and what `sigma0` adds to them."""

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, field_validator

from sigma0.config import Effort, ExitConfig, OnCollapse
from sigma0.ladder import Budget
from sigma0.serve.api.fields import FILLED, FIRST_ERROR, ChatFields, ChatMessage, Closed, Settings, StreamOptions, Text

MAX_STOPS = 4
# OpenAI's own default of completions; a chat may go on to the end of the context
COMPLETION_TOKENS = 16
MAX_SETTING = 10**6
# below it logits may be divided up to infinity, of which nothing can be drawn; a device that tries is lost to all
_LEAST_TEMPERATURE = 1e-6


def _likeliest(value: float) -> float:
    return value if value >= _LEAST_TEMPERATURE else 0.0


def _whole(value: Any) -> Any:
    """A number that is written as 5.0 is 5: JSON knows no difference, and some clients write all numbers so."""
    return int(value) if type(value) is float and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    # almost never needed, and a list may hold half a million
    return (
        [_whole(value) for value in values] if isinstance(values, list) and float in set(map(type, values)) else values
    )


_WHOLE = BeforeValidator(_whole)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FILLED, BeforeValidator(_all_whole)]
FilledText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[FilledText, Field(max_length=1000)]
Count = Annotated[int, Field(ge=1, lt=2**31), _WHOLE]


_EXIT = TypeAdapter(ExitConfig)


class Sigma0Options(Closed):
    """What this server can beyond OpenAI's protocol.

    Attributes:
        exit: An exit setting, as `sigma0.config.ExitConfig` takes it; wins over `reasoning_effort`.
        ladder: Whether the server's ladder answers, or what goes up there; False: not even where the server routes.
        budget: Limits of the ladder, as `sigma0.ladder.Budget` takes them; the server's own hold as well.
        trail: Whether the ladder's decisions are sent with the response.
        sources: Texts that the answer may be grounded in, beside the prompt.
        special_tokens: Whether special tokens in the messages or the prompt are those tokens; else they are text.
        on_collapse: What becomes of a text that runs in circles; None: as the server was started.
    """

    exit: Settings | None = None
    ladder: bool | Literal["token", "draft", "answer"] | None = None
    budget: Settings | None = None
    trail: bool = False
    sources: Annotated[list[Text], FIRST_ERROR] = Field(default_factory=list)
    special_tokens: bool = False
    on_collapse: OnCollapse | None = None

    @field_validator("exit")
    @classmethod
    def _is_an_exit_setting(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            value = {name: _whole(setting) for name, setting in value.items()}
            # not its constructor, which tells in one line what is wanted by field here; as JSON, since a strict
            # dataclass takes no mapping
            _EXIT.validate_json(json.dumps(value), strict=True).check_read()
            # counts of loops are held in 64 bits further in
            if any(isinstance(each, int | float) and abs(each) > MAX_SETTING for each in value.values()):
                raise ValueError(f"holds a number over {MAX_SETTING}")
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


class RequestFields(Closed, ABC):
    """What both kinds of requests have. What OpenAI has and this server has not stands in `sigma0.serve.api.fields`.

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
        reasoning_effort: How long tokens loop, see `sigma0.config`.
        logit_bias: Not offered.
        user: Without effect.
        cache_salt: As vLLM has it: only requests with the same one share K/V of prompts that begin alike. It should be
            long, random, and known to nobody else.
        sigma0: What this server can beyond OpenAI's protocol.
    """

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_likeliest)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    logit_bias: Annotated[Settings, Field(max_length=0)] | None = None
    user: Text | None = None
    cache_salt: Annotated[FilledText, Field(max_length=1000)] | None = None
    sigma0: Sigma0Options | None = None

    @field_validator("stream_options")
    @classmethod
    def _needs_a_stream(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("needs stream=true")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    @abstractmethod
    def told_logprobs(self) -> int | None:
        """Alternatives beside each token's log-probability; None where neither is asked for."""


class ChatRequest(RequestFields, ChatFields):
    """The body of `POST /v1/chat/completions`; what it shares with completions stands in `RequestFields`.

    Attributes:
        messages: A last one of the assistant is continued.
        logprobs: Whether log-probabilities are told.
        top_logprobs: Alternatives beside each; needs `logprobs`.
    """

    messages: Annotated[list[ChatMessage], FILLED]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), _WHOLE] | None = None

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


class CompletionRequest(RequestFields):
    """The body of `POST /v1/completions`; what it shares with chats stands in `RequestFields`.

    Attributes:
        prompt: Texts or ids, one or several.
        logprobs: Alternatives beside each token's log-probability; None tells neither.
        best_of: Not offered: all choices are returned.
        echo: Not offered.
        suffix: Not offered.
    """

    prompt: FilledText | Annotated[list[FilledText], FILLED] | Ids | Annotated[list[Ids], FILLED]
    logprobs: Annotated[int, Field(ge=0, le=5), _WHOLE] | None = None
    best_of: Count | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @field_validator("best_of")
    @classmethod
    def _keeps_all(cls, value: int | None, info: Any) -> int | None:
        if value not in (None, info.data.get("n") or 1):
            raise ValueError("is not n")
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
