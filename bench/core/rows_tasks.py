"""Rows about tasks: how often a model solves them."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sigma0.bench.core.rows import Conditions, Figure
from sigma0.reason.progressive.policies import Level

Outcome = Literal["passed", "syntax", "exception", "wrong", "time", "limits"]


class HumanEvalRow(Conditions):
    """How many problems of HumanEval a model solves at one setting; intervals are over problems.

    Attributes:
        benchmark: "humaneval".
        time: When it was judged, ISO 8601, UTC.
        exit_config: Of a looped model, whole; None of others.
        temperature: 0 is greedy.
        seed: Of the sampling.
        stop: Strings that end a completion.
        strip_prompt: Whether white space at the end of prompts was left for the model to write.
        samples: Completions of each problem.
        sample_commits: Of the code that wrote them, as `commit` is of the code that judged them.
        timeout_s: For one completion's check.
        memory_mb: Likewise.
        pass_at_k: Unbiased estimate of the share of problems that k samples solve, by k. The interval is none where no
            sample passed, or all did: `solved` tells the noise of those.
        solved: Share of problems that any of their samples solved, with its exact interval.
        outcomes: How many samples ended how.
        unfinished: How many samples were cut off at the limit of new tokens.
        new_tokens: Of all samples.
        mean_depth: Exit depth over the tokens after each first; None of a model without loops, as are the next two.
        passes_saved: 1 - passes / (T tokens), counted, over the same tokens.
        rows_saved: 1 - rows / (T tokens), counted.
    """

    benchmark: Literal["humaneval"] = "humaneval"
    time: str
    exit_config: dict[str, Any] | None
    temperature: float
    seed: int
    stop: tuple[str, ...]
    strip_prompt: bool
    samples: int
    sample_commits: tuple[str | None, ...]
    timeout_s: float
    memory_mb: int
    pass_at_k: dict[int, Figure]
    solved: Figure
    outcomes: dict[Outcome, int]
    unfinished: int
    new_tokens: int
    mean_depth: Figure | None
    passes_saved: Figure | None
    rows_saved: Figure | None

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        settings = [self.exit_config, self.temperature, self.seed, self.stop, self.strip_prompt, self.samples]
        return json.dumps([self.benchmark, *settings, self.timeout_s, self.memory_mb], sort_keys=True)


class StrategyQARow(Conditions):
    """A level of control on yes or no questions, at most once an item.

    Of an endpoint, `model_sha256` is that of its address, and loops and parameters are 0: they are not known.

    Attributes:
        benchmark: "strategyqa".
        time: When the run ended, ISO 8601, UTC; the same for all its rows.
        level: Name of the level.
        variant: What it was made with, where that is not always the same: who routes, which file it was shown.
        labels: What it used of labels.
        effort: As the model was asked with.
        temperature: 0 is greedy.
        seed: Of the sampling.
        accuracy: Share of right answers with its exact interval; an item without an answer is wrong.
        majority: Share of the commoner label: what always saying it would score.
        misses: Items without an answer, by the step that failed.
        against: The level that it is held against.
        difference: Accuracy less that of `against` on the same items; None for that one, and where it was not run.
        p_value: Of McNemar's exact test against it on the same items.
        p_holm: The same, corrected by Holm's method for all levels of the run.
        calls: Questions to the model for each item.
        prompt_tokens: Ids read, all items together.
        completion_tokens: Ids written, likewise.
        loop_passes: Of looped blocks, prompts left out, likewise; 0 of a model without them, or one that tells none.
        bytes_read: Passes times block bytes, over the rungs of a ladder; else 0.
        seconds: From question to answer, summed over all questions; of a batch each has its share.
        doors: That the verdicts on answers opened; empty of a model without verdicts.
    """

    benchmark: Literal["strategyqa"] = "strategyqa"
    time: str
    level: str
    variant: str
    labels: str
    effort: str
    temperature: float
    seed: int
    accuracy: Figure
    majority: float
    misses: dict[str, int]
    against: str
    difference: float | None
    p_value: float | None
    p_holm: float | None
    calls: float
    prompt_tokens: int
    completion_tokens: int
    loop_passes: int
    bytes_read: int
    seconds: float
    doors: dict[str, int]

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return json.dumps(
            [self.benchmark, self.time, self.level, self.variant, self.effort, self.temperature, self.seed]
        )


class LevelRates(BaseModel):
    """Progressive effort at one level of verification.

    Attributes:
        reached: Questions that were verified at it.
        passed: Share of those that got out of it: to a higher one, or out of the last.
        checks: Verifications at it.
        checks_passed: Share of those that passed; its interval knows that those of one question go together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reached: int
    passed: Figure
    checks: int
    checks_passed: Figure


class OuterRow(Conditions):
    """A way to answer, at once or by an outer loop, on the same questions as every way of its run.

    Attributes:
        benchmark: "outer".
        time: When the run began, ISO 8601, UTC; the same for all its rows.
        way: Its name.
        seed: Of the stories and the samples.
        right: Share of right answers with its exact interval.
        accepted_wrong: Share of all questions on which the way stood behind a wrong answer.
        accepted: Share on which it stood behind its answer.
        passes: Of the looped block a question, those over its prompts included; without loops one a token and prompt.
        cost: Those passes times the weights of a block, in passes of the run's first model.
        calls: Questions to the model for each item.
        prompt_tokens: Ids read for each item.
        completion_tokens: Ids written for each item.
        seconds: From question to answer, for each item.
        beats: Points that it has right more than other ways of the run, on the same questions, by their names.
        p_values: Of McNemar's exact test against them.
        levels: Of progressive effort, the levels of verification that were reached; of another way none.
    """

    benchmark: Literal["outer"] = "outer"
    time: str
    way: str
    seed: int
    right: Figure
    accepted_wrong: Figure
    accepted: Figure
    passes: Figure
    cost: float
    calls: float
    prompt_tokens: float
    completion_tokens: float
    seconds: float
    beats: dict[str, Figure]
    p_values: dict[str, float]
    levels: dict[Level, LevelRates] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two rows of a run measurements of the same thing."""
        return json.dumps([self.benchmark, self.time, self.way, self.seed])
