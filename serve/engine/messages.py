"""What passes between the protocol and the engine: jobs in, tokens and an end out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sigma0.config import ExitConfig, OnCollapse
from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate
from sigma0.decode.sampler import Alternative, Sampling
from sigma0.signals.savings import Savings
from sigma0.signals.verdict import Door, ReasonVerdict

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Job:
    """One text to be continued.

    Attributes:
        prompt_ids: At least one.
        max_new_tokens: At least 1; with the prompt within the model's context.
        exit_config: When tokens stop.
        sampling: How ids are chosen.
        stop: Strings that end the text, which does not hold them.
        logprobs: How many alternatives are told beside each token's log-probability; None tells neither.
        context: Texts that the answer may be grounded in.
        whole: Whether nothing of it is told before its end, so that it may be begun anew where its engine is lost.
        cache_salt: Only jobs with the same one share K/V of prompts that begin alike; None shares with all without one.
        on_collapse: What becomes of a text that runs in circles.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    exit_config: ExitConfig
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    context: tuple[str, ...] = ()
    whole: bool = False
    cache_salt: str | None = None
    on_collapse: OnCollapse = "stop"


@dataclass(frozen=True)
class TokenTold:
    """A new token, final: it is not taken back.

    Attributes:
        id: Its id.
        text: What may be shown since the token before it: it may be "" while a character is not complete or a stop
            string may have begun. The texts of all tokens make the whole text.
        depth: Loop that it was read at, from 1; 0 of a model without loops.
        reason: Why there; None of a model without loops.
        fate: Of its loops so far.
        proximity: How near the text is to running in circles.
        margin: Lead of the likeliest id.
        entropy: Of the distribution, nats.
        logprob: Of the token; None where not asked for.
        alternatives: The likeliest ids, likeliest first.
        rung: Name of the model that wrote it.
        handed_up: Why it left the lowest rung of a ladder; None where it did not.
        would_have_met: Under `full` and `fixed`, whether the model's own rule would have been met by that loop; None
            where that is not known.
    """

    id: int
    text: str
    depth: int
    reason: Reason | None
    fate: Fate | None
    proximity: float | None
    margin: float | None
    entropy: float | None
    logprob: float | None
    alternatives: tuple[Alternative, ...]
    rung: str
    handed_up: str | None = None
    would_have_met: bool | None = None


@dataclass(frozen=True)
class JobDone:
    """The end of a job.

    Attributes:
        text: The whole new text.
        tokens: All tokens, with what became known of their loops behind their exits.
        finish_reason: `stop` (an end id, a stop string or a collapse) or `length`.
        prompt_tokens: Ids of the prompt.
        cached_tokens: Of those, how many were found in the prefix cache.
        total_loops: T.
        passes: Passes in which the job had a token on its way, behind its first token.
        rows: Rows of the job in those passes.
        savings: Over the tokens after the first.
        verdict: On the whole text; None where verdicts are switched off.
        door: That it opens; of a ladder also `abort`, `top_rung` or `accepted`.
        door_text: The door and why, in a sentence.
        preemptions: How often its K/V were given up and made anew.
        trail: A ladder's decisions, one JSON object each; empty elsewhere.
        costs: Of each rung of a ladder, as JSON values; empty elsewhere.
        collapsed: Whether it was ended because it ran in circles.
    """

    text: str
    tokens: tuple[TokenTold, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    total_loops: int
    passes: int
    rows: int
    savings: Savings
    verdict: ReasonVerdict | None
    door: Door | Literal["top_rung", "accepted"] | None
    door_text: str | None
    preemptions: int = 0
    trail: tuple[dict[str, Any], ...] = ()
    costs: tuple[dict[str, Any], ...] = ()
    collapsed: bool = False


@dataclass(frozen=True)
class ServiceStatus:
    """How a service stands.

    Attributes:
        waiting: Jobs in the queue.
        running: Jobs on their way.
        passes: Passes so far.
        rows: Rows in them.
        tokens: New tokens so far.
        exit_loops: Sum of their depths.
        pages_total: Pages of K/V.
        pages_used: Of those, held by jobs.
        pages_cached: Of those, kept for prompts that begin alike.
        preemptions: Jobs that were put back.
    """

    waiting: int
    running: int
    passes: int
    rows: int
    tokens: int
    exit_loops: int
    pages_total: int
    pages_used: int
    pages_cached: int
    preemptions: int


class Busy(RuntimeError):
    """The queue is full."""


class ShuttingDown(Busy):
    """The service is being shut down, and takes no more."""


class Unavailable(RuntimeError):
    """There is no engine that could take a job."""


class JobFailed(RuntimeError):
    """Something broke inside of one job; others go on."""


class JobCutOff(JobFailed):
    """The service was ended ahead of the job."""


class JobEvents(Protocol):
    """Tokens of a job as they come, then its end."""

    def __aiter__(self) -> "JobEvents":
        """Itself."""

    async def __anext__(self) -> TokenTold | JobDone:
        """The next one.

        Raises:
            JobFailed: If something broke.
            Unavailable: If the last engine was lost.
        """

    async def aclose(self) -> None:
        """Cancels the job, whether or not anything of it was read; one that is over stays as it was."""


class Service(Protocol):
    """What the protocol knows of the engine.

    Attributes:
        name: Of the model.
        model: The looped model.
        tokenizer: Its tokenizer.
        context: Tokens that prompt and answer may have together.
    """

    name: str
    model: Any
    tokenizer: Any
    context: int

    def submit(self, job: Job) -> JobEvents:
        """Queues a job at once.

        Raises:
            ValueError: For a job that can never run.
            Busy: Where no more jobs are taken.
            Unavailable: Where no engine is up.
        """

    @property
    def is_up(self) -> bool:
        """Whether there is an engine that takes jobs."""

    def status(self) -> ServiceStatus:
        """How it stands; of several engines, how they do together."""

    def engines(self) -> Mapping[str, ServiceStatus]:
        """How each of several engines stands, by name; empty of a single one."""

    async def drain(self) -> None:
        """Takes no more jobs and returns once all that were taken are over."""
