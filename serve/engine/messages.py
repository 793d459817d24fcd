"""Messages between the API and the engine: requests in, token outputs and request outputs out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from transformers import PreTrainedTokenizerFast

from sigma0.config import ExitConfig, OnCollapse
from sigma0.decode.exits import Reason
from sigma0.decode.grammar.spec import Spec
from sigma0.decode.logits import Alternative
from sigma0.decode.ops import Fate
from sigma0.decode.sampling_params import SamplingParams
from sigma0.models.stored_settings import StoredSettings
from sigma0.signals.savings import Savings
from sigma0.signals.verdict import Door, ReasonVerdict

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine."""

    max_running: int = 16  # Requests that run at most
    max_waiting: int = 64  # Requests in the queue at most
    pass_rows: int = 256  # Rows up to which prefill may fill a pass
    page_size: int = 16  # Cache positions of a block of K/V
    kv_bytes: int = 2**28  # Memory for K/V in bytes, allocated when the engine is made


@dataclass(frozen=True)
class EngineRequest:
    """A prompt to be continued."""

    prompt_ids: tuple[int, ...]  # At least one
    max_new_tokens: int  # At least 1; with the prompt within the model's context
    exit_config: ExitConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()  # Strings that end the text, which does not hold them
    logprobs: int | None = None  # Number of alternatives output with each token's log-probability; None for neither
    # The same of the prompt's ids, which then are all computed, and none taken from the cache
    prompt_logprobs: int | None = None
    ignore_eos: bool = False  # Whether end ids are tokens like others
    context: tuple[str, ...] = ()  # Texts that the answer may be grounded in
    # Whether nothing is sent to the client before the end, so that it may be restarted where its engine is lost
    whole: bool = False
    # Only requests with the same one share K/V of a common prefix; None shares with all without one
    cache_salt: str | None = None
    on_collapse: OnCollapse = "stop"
    grammar: Spec | None = None  # What the answer has to be; None for anything
    id: str = field(default="", compare=False)  # What it is called in a list of requests; nothing depends on it


def context_length(model: StoredSettings, blocks: int, block_size: int) -> int:
    """Most tokens of prompt and answer together: limited by the model's positions and by the K/V memory.

    Args:
        model: The settings of the looped model.
        blocks: Number of blocks of K/V.
        block_size: Cache positions of a block.
    """
    return min(int(model.config.max_position_embeddings), blocks * block_size)


def check_request(request: EngineRequest, model: StoredSettings, context: int) -> None:
    """Refuses a request that can never run; before it is queued, also where the engine is in another process.

    Args:
        request: The request.
        model: The settings of the looped model.
        context: As `context_length` gives it.

    Raises:
        ValueError: Naming what does not fit.
    """
    length = len(request.prompt_ids) + request.max_new_tokens
    if not request.prompt_ids or request.max_new_tokens < 1:
        raise ValueError("a request needs at least one prompt id and one new token")
    limit = model.config.max_position_embeddings
    if length > limit:
        raise ValueError(f"{length} tokens exceed the model's context of {limit}")
    if length > context:
        raise ValueError(f"{length} tokens exceed the {context} that this engine's K/V hold")
    size = model.config.vocab_size
    if max(request.prompt_ids) >= size or min(request.prompt_ids) < 0:
        # on CUDA such an id would end the whole process
        raise ValueError(f"the prompt holds an id outside of the model's {size}; its tokenizer does not fit it")
    if request.prompt_logprobs is not None and vars(model.config).get("n_layers_in_coda"):
        raise ValueError("the log-probabilities of a prompt are not known of a model with a coda")
    if request.ignore_eos and request.grammar is not None:
        raise ValueError("an answer that follows a grammar ends where it does: leave ignore_eos out")
    model.exit_rule(request.exit_config)


class PromptToken(NamedTuple):
    """An id of a prompt, as the model would have sampled it after those before, at the last loop that prompts run.

    The most probable ids come in falling order.
    """

    id: int
    logprob: float
    alternatives: tuple[Alternative, ...]


class TokenOutput(NamedTuple):
    """A new token, final: it is never taken back."""

    id: int
    # New text that may be shown: "" while a character is incomplete or a stop string may have begun. The texts of
    # all tokens together are the whole text
    text: str
    depth: int  # Loop that it was sampled at, from 1; 0 of a model without loops
    reason: Reason | None  # Why it exited there; None of a model without loops
    fate: Fate | None  # Of its loops so far
    proximity: float | None  # Repetition score of the text
    margin: float | None  # Lead of the top-1 over the top-2 probability
    entropy: float | None  # Of the distribution, in nats
    logprob: float | None  # None where not requested
    alternatives: tuple[Alternative, ...]  # The most probable ids, in falling order
    rung: str  # Name of the model that sampled it
    handed_up: str | None = None  # Why it left the lowest rung of a ladder; None where it did not
    # Under `full` and `fixed`, whether the model's own exit rule would have been met by that loop; None where
    # that is not known
    would_have_met: bool | None = None
    # Minus log probability of the token after the last loop that it has run, nats: at its exit or deeper. Known
    # once the request is finished, and not of every model (`sigma0.decode.stats`); as are the next three
    deepest_surprise: float | None = None
    deepest_entropy: float | None = None  # Of the distribution there, in nats
    deepest_margin: float | None = None  # Lead of the top-1 over the top-2 probability there
    deepest_agrees: bool | None = None  # Whether the token is the most probable one there


class Times(NamedTuple):
    """Seconds of a request in its engine."""

    queue: float  # Until it was first admitted
    prefill: float  # From then on, until its first token
    decode: float  # From then on, until its end


@dataclass(frozen=True)
class RequestOutput:
    """The output of a finished request."""

    text: str
    tokens: tuple[TokenOutput, ...]  # All tokens, with what their loops after their exits have added
    # `stop` (an end id, a stop string or a collapse) or `length`; under a grammar a collapse is that
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # Of the prompt's ids, how many were found in the prefix cache
    total_loops: int  # T
    passes: int  # Passes with a row of a new token, after the first token
    rows: int  # Rows of the request in those passes
    savings: Savings  # Over the tokens after the first
    verdict: ReasonVerdict | None = None  # On the whole text; None where verdicts are switched off
    door: Door | None = None  # Its routing decision; `abort` of a ladder alone
    door_text: str | None = None  # The decision and its reasons, in a sentence
    preemptions: int = 0  # How often it was preempted and recomputed
    trail: tuple[dict[str, Any], ...] = ()  # Decisions of a ladder, one JSON object each; empty elsewhere
    costs: tuple[dict[str, Any], ...] = ()  # Of each rung of a ladder, as JSON values; empty elsewhere
    collapsed: bool = False  # Whether it was ended because it repeated itself
    times: Times | None = field(default=None, compare=False)  # How long it waited and ran; None where no engine says
    # Of the prompt's ids from the second on, where their log-probabilities were requested
    prompt: tuple[PromptToken, ...] = ()
    top_rung: bool = False  # Of a ladder, whether its highest rung was asked
    not_tried: tuple[str, ...] = ()  # Of a ladder, rung and limit of each kind of step that the budget refused

    @property
    def tokens_forced(self) -> int:
        """Tokens that were fed without a reading, since the grammar allowed no other."""
        return sum(token.reason == "forced" for token in self.tokens)


@dataclass(frozen=True)
class ServiceStatus:
    """Gauges and counters of a service."""

    waiting: int  # Requests in the queue
    running: int  # Requests that run
    passes: int  # So far, as are the rows in them, new tokens and preemptions
    rows: int
    tokens: int
    exit_loops: int  # Sum of the depths of those tokens
    blocks_total: int  # Of K/V: those that requests hold, those that only the prefix cache keeps, and free ones
    blocks_used: int
    blocks_cached: int
    preemptions: int


@dataclass(frozen=True)
class SlotView:
    """A request in an engine, running or waiting, without anything of its text."""

    id: str  # Beginning of the id of its HTTP request, and the number of its choice
    # `waiting` for a lane and pages, also after a preemption; `prefill` until its first token; `decode`
    state: Literal["waiting", "prefill", "decode"]
    lane: int | None  # Its place in the batch; None while it waits
    prompt_tokens: int
    new_tokens: int
    max_new_tokens: int
    pages: int  # Pages of K/V that it holds
    exit: str  # Mode of its exit setting
    after_exit: str  # What becomes of tokens after their exits
    depth: int | None  # Loop that its newest token was read at; None before the first one
    preemptions: int
    seconds: float  # Since it was queued
    engine: str | None = None  # Name of its engine; None where there is only one


class Busy(RuntimeError):
    """The queue is full."""


class ShuttingDown(Busy):
    """The service is shutting down, and takes no more requests."""


class Unavailable(RuntimeError):
    """There is no engine that could take a request."""


class RequestFailed(RuntimeError):
    """Something broke inside of one request; others go on.

    Args:
        message: In a sentence that holds nothing of a prompt.
        cause: Type of the exception after it, by name: the exception itself may hold anything.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RequestCutOff(RequestFailed):
    """The service ended before the request did."""


Event = TokenOutput | RequestOutput | RequestFailed | Busy | Unavailable


class RequestEvents(Protocol):
    """Token outputs of a request as they come, then its request output."""

    def __aiter__(self) -> "RequestEvents":
        """Itself."""

    async def __anext__(self) -> TokenOutput | RequestOutput:
        """The next one.

        Raises:
            RequestFailed: If something broke.
            Unavailable: If the engine was lost, or the last of several.
        """

    async def aclose(self) -> None:
        """Cancels the request, whether or not anything of it was read; a finished one stays as it was."""


class Service(Protocol):
    """The engine, or several, as the API sees them."""

    name: str  # Of the model
    model: StoredSettings  # The settings of the looped model
    tokenizer: PreTrainedTokenizerFast  # Its tokenizer
    context: int  # Most tokens of prompt and answer together

    def submit(self, request: EngineRequest) -> RequestEvents:
        """Queues a request at once.

        Raises:
            ValueError: For a request that can never run.
            Busy: Where no more requests are taken.
            Unavailable: Where no engine is up.
        """

    @property
    def is_up(self) -> bool:
        """Whether there is an engine that takes requests."""

    def status(self) -> ServiceStatus:
        """Gauges and counters; of several engines, summed."""

    async def slots(self) -> Sequence[SlotView]:
        """The requests in the engine, or in all of several: those that run, then those that wait.

        Raises:
            Unavailable: Where no engine is up.
            TimeoutError: Where one does not answer.
        """

    def engines(self) -> Mapping[str, ServiceStatus]:
        """The status of each of several engines, by name; empty for a single one."""

    async def drain(self) -> None:
        """Takes no more requests and returns once all that were taken are finished."""
