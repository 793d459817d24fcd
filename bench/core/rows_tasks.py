"""Rows about tasks: how often a model solves them."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from sigma0.bench.core.rows import Figure, Measured
from sigma0.reason.progressive.policies import Level

Outcome = Literal["passed", "syntax", "exception", "wrong", "time", "limits"]


class HumanEvalRow(Measured):
    """How many problems of HumanEval a model solves at one setting; intervals are over problems."""

    benchmark: Literal["humaneval"] = "humaneval"
    keyed: ClassVar = (
        "exit_config",
        "temperature",
        "seed",
        "stop",
        "strip_prompt",
        "samples",
        "timeout_s",
        "memory_mb",
    )
    exit_config: dict[str, Any] | None  # Of a looped model, whole; None of others
    temperature: float  # 0 is greedy
    seed: int  # Of the sampling
    stop: tuple[str, ...]  # Strings that end a completion
    strip_prompt: bool  # Whether white space at the end of prompts was left for the model to write
    samples: int  # Completions of each problem
    sample_commits: tuple[str | None, ...]  # Of the code that wrote them, as `commit` is of the code that judged them
    timeout_s: float  # For one completion's check
    memory_mb: int  # Likewise
    # Unbiased estimate of the share of problems that k samples solve, by k. The interval is none where no sample
    # passed, or all did: `solved` tells the noise of those
    pass_at_k: dict[int, Figure]
    solved: Figure  # Share of problems that any of their samples solved, with its exact interval
    outcomes: dict[Outcome, int]  # How many samples ended how
    unfinished: int  # How many samples were cut off at the limit of new tokens
    new_tokens: int  # Of all samples
    # Exit depth over the tokens after each first; None of a model without loops, as are the next two
    mean_depth: Figure | None
    passes_saved: Figure | None  # 1 - passes / (T tokens), counted, over the same tokens
    rows_saved: Figure | None  # 1 - rows / (T tokens), counted


class StrategyQARow(Measured):
    """A level of control on yes or no questions, at most once an item.

    Of an endpoint, `model_sha256` is that of its address, and loops and parameters are 0: they are not known.
    """

    benchmark: Literal["strategyqa"] = "strategyqa"
    keyed: ClassVar = ("time", "level", "variant", "effort", "temperature", "seed")
    level: str  # Name of the level
    variant: str  # What it was made with, where that is not always the same: who routes, which file it was shown
    labels: str  # What it used of labels
    effort: str  # As the model was asked with
    temperature: float  # 0 is greedy
    seed: int  # Of the sampling
    accuracy: Figure  # Share of right answers with its exact interval; an item without an answer is wrong
    majority: float  # Share of the commoner label: what always saying it would score
    misses: dict[str, int]  # Items without an answer, by the step that failed
    against: str  # The level that it is held against
    # Accuracy less that of `against` on the same items; None for that one, and where it was not run
    difference: float | None
    p_value: float | None  # Of McNemar's exact test against it on the same items
    p_holm: float | None  # The same, corrected by Holm's method for all levels of the run
    calls: float  # Questions to the model for each item
    prompt_tokens: int  # Ids read, all items together
    completion_tokens: int  # Ids written, likewise
    loop_passes: int  # Of looped blocks, prompts left out, likewise; 0 of a model without them, or one that tells none
    bytes_read: int  # Passes times block bytes, over the rungs of a ladder; else 0
    seconds: float  # From question to answer, summed over all questions; of a batch each has its share
    doors: dict[str, int]  # That the verdicts on answers opened; empty of a model without verdicts


class LevelRates(BaseModel):
    """Progressive effort at one level of verification."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reached: int  # Questions that were verified at it
    passed: Figure  # Share of those that got out of it: to a higher one, or out of the last
    checks: int  # Verifications at it
    checks_passed: Figure  # Share of those that passed; its interval knows that those of one question go together


class OuterRow(Measured):
    """A way to answer, at once or by an outer loop, on the same questions as every way of its run."""

    benchmark: Literal["outer"] = "outer"
    keyed: ClassVar = ("time", "way", "seed")
    way: str  # Its name
    seed: int  # Of the stories and the samples
    right: Figure  # Share of right answers with its exact interval
    accepted_wrong: Figure  # Share of all questions on which the way stood behind a wrong answer
    accepted: Figure  # Share on which it stood behind its answer
    # Of the looped block a question, those over its prompts included; without loops one a token and prompt
    passes: Figure
    cost: float  # Those passes times the weights of a block, in passes of the run's first model
    calls: float  # Questions to the model for each item
    prompt_tokens: float  # Ids read for each item
    completion_tokens: float  # Ids written for each item
    seconds: float  # From question to answer, for each item
    # Points that it has right more than other ways of the run, on the same questions, by their names
    beats: dict[str, Figure]
    p_values: dict[str, float]  # Of McNemar's exact test against them
    # Of progressive effort, the levels of verification that were reached; of another way none
    levels: dict[Level, LevelRates] = Field(default_factory=dict)
