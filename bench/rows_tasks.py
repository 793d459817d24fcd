"""Rows about tasks: how often a model solves them."""

import json
from typing import Any, Literal

from sigma0.bench.rows import Conditions, Figure

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
        solved: Share of problems that any of their samples solved, with its Wilson interval.
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
