"""Request bodies: OpenAI's chat and completion requests, and the field `sigma0` that extends them."""

import json
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, field_validator

from sigma0.config import Effort, ExitConfig, OnCollapse
from sigma0.ladder import Budget
from sigma0.serve.api.fields import (
    FILLED,
    FIRST_ERROR,
    ChatFields,
    ChatMessage,
    Closed,
    Settings,
    StreamOptions,
    Text,
)
from sigma0.serve.api.structured import FilledText, StructuredFields
from sigma0.serve.api.tools import ToolFields

MAX_STOPS = 4
# OpenAI's default for completions; a chat may fill the context
COMPLETION_TOKENS = 16
MAX_SETTING = 10**6
# as with OpenAI
MAX_BIASES = 300
# below it logits may overflow to infinity, which cannot be sampled; on CUDA that would end the process
_LEAST_TEMPERATURE = 1e-6


def _greedy_if_tiny(value: float) -> float:
    return value if value >= _LEAST_TEMPERATURE else 0.0


def _whole(value: Any) -> Any:
    """5.0 is taken as 5: JSON does not distinguish them, and some clients write all numbers as floats."""
    return int(value) if type(value) is float and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    # rarely needed, and a list may hold half a million ids
    return (
        [_whole(value) for value in values] if isinstance(values, list) and float in set(map(type, values)) else values
    )


_WHOLE = BeforeValidator(_whole)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FILLED, BeforeValidator(_all_whole)]
Stop = Annotated[FilledText, Field(max_length=1000)]
Count = Annotated[int, Field(ge=1, lt=2**31), _WHOLE]


_BiasKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"holds over {MAX_BIASES} ids")
    return value


LogitBias = Annotated[
    dict[_BiasKey, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_few_biases),
]
_EXIT = TypeAdapter(ExitConfig)


class Sigma0Options(Closed):
    """Options of this server beyond OpenAI's protocol.

    Attributes:
        exit: An exit setting, as `sigma0.config.ExitConfig` takes it; overrides `reasoning_effort`.
        ladder: Whether the server's ladder answers, or the unit that it hands up; False: not even with routing on.
        budget: Limits of the ladder, as `sigma0.ladder.Budget` takes them; the server's limits hold as well.
        trail: Whether the ladder's decisions are sent with the response.
        sources: Texts that the answer may be grounded in, beside the prompt.
        special_tokens: Whether special tokens in the messages or the prompt are parsed as such; else they are text.
        on_collapse: What is done with a text that repeats itself; None: as the server was started.
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
            # not by its constructor, which raises one line for all fields; as JSON, since a strict dataclass takes no
            # mapping
            _EXIT.validate_json(json.dumps(value), strict=True).check_read()
            # loop counts are kept in 64 bits
            if any(isinstance(setting, int | float) and abs(setting) > MAX_SETTING for setting in value.values()):
                raise ValueError(f"holds a number over {MAX_SETTING}")
        return value

    @field_validator("budget")
    @classmethod
    def _is_a_budget(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            for name, limit in value.items():
                # Budget takes false for 0
                if isinstance(limit, bool):
                    raise ValueError(f"{name} is a number, not {json.dumps(limit)}")
            Budget(**value)
        return value

    @property
    def limits(self) -> Budget | None:
        """The budget."""
        return None if self.budget is None else Budget(**self.budget)


class RequestFields(StructuredFields, ABC):
    """Fields of both kinds of requests; unsupported fields of OpenAI's are in `sigma0.serve.api.fields`, and those
    that say what the answer has to be in `sigma0.serve.api.structured`.

    Attributes:
        model: Name of the served model.
        max_tokens: New tokens at most.
        max_completion_tokens: The same; overrides `max_tokens`.
        stop: Strings that end the text, which does not hold them.
        n: Choices for each prompt.
        seed: Of sampling; choice i has `seed` + i.
        temperature: 0, and anything under a millionth, is greedy; None: the checkpoint's, and 0 where it has none.
        top_p: None for the checkpoint's, here and for the next three.
        top_k: 0 for none.
        min_p: 0 for none.
        repetition_penalty: 1 for none.
        presence_penalty: Subtracted from the logits of ids that were generated already.
        frequency_penalty: Subtracted from them once for each time that they were generated.
        stream: Whether tokens are sent as they come.
        stream_options: Options of the stream.
        reasoning_effort: How deep tokens loop, see `sigma0.config`.
        logit_bias: Added to the logits of ids, which are its keys.
        ignore_eos: Whether an end id is a token like others, so that an answer has `max_tokens` or a stop string.
        user: Without effect.
        cache_salt: As with vLLM, only requests with the same one share K/V of a common prefix. It should be long,
            random and secret.
        sigma0: Options of this server beyond OpenAI's protocol.
    """

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_greedy_if_tiny)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
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
    def num_logprobs(self) -> int | None:
        """Number of alternatives sent with each token's log-probability; None where neither was requested."""


class ChatRequest(RequestFields, ChatFields, ToolFields):
    """The body of `POST /v1/chat/completions`; the fields that completions share are in `RequestFields`.

    Attributes:
        messages: A last one of the assistant is continued.
        logprobs: Whether log-probabilities are sent.
        top_logprobs: Number of alternatives of each token; needs `logprobs`.
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
    def num_logprobs(self) -> int | None:
        """Number of alternatives sent with each token's log-probability; None where neither was requested."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(RequestFields):
    """The body of `POST /v1/completions`; the fields that chats share are in `RequestFields`.

    Attributes:
        prompt: Texts or ids, one or several.
        logprobs: Number of alternatives sent with each token's log-probability; None for neither.
        best_of: Not supported: all choices are returned.
        max_tokens: New tokens at most; 0 for the prompt alone.
        echo: Whether the text begins with the prompt; with `logprobs`, theirs are those of its tokens too.
        suffix: Not supported.
    """

    prompt: FilledText | Annotated[list[FilledText], FILLED] | Ids | Annotated[list[Ids], FILLED]
    logprobs: Annotated[int, Field(ge=0, le=5), _WHOLE] | None = None
    best_of: Count | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None

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
        prompts: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for part in self.prompt:
            if isinstance(part, int):
                ids.append(part)
            else:
                prompts.append(part if isinstance(part, str) else tuple(part))
        return (tuple(ids),) if ids else tuple(prompts)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives sent with each token's log-probability; None where neither was requested."""
        return self.logprobs
