"""Judged samples as a row of the ledger."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import get_args

from sigma0.bench.core.rows import Figure
from sigma0.bench.core.rows_tasks import HumanEvalRow, Outcome
from sigma0.bench.humaneval.judging import Judgement, Limits
from sigma0.bench.humaneval.passing import estimates
from sigma0.bench.humaneval.sampling import Sample
from sigma0.bench.humaneval.saved import Run
from sigma0.calibrate.bootstrap import Estimate, ratio, share

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def row_of(
    run: Run,
    samples: Sequence[Sequence[Sample]],
    judged: Sequence[Sequence[Judgement]],
    limits: Limits,
    commits: tuple[str | None, ...],
) -> HumanEvalRow:
    """The row of a run.

    Args:
        run: That wrote the samples.
        samples: Of each problem, at least one.
        judged: What became of them.
        limits: Of the judging.
        commits: Of the code that wrote them.
    """
    passed = [sum(each.outcome == "passed" for each in row) for row in judged]
    counts = Counter(each.outcome for row in judged for each in row)
    loops = run.conditions.total_loops
    each = [sample for row in samples for sample in row]
    figures = {
        "pass_at_k": {k: Figure.of(estimate) for k, estimate in estimates(run.samples, passed).items()},
        "solved": Figure.of(_solved(passed)),
        "mean_depth": Figure.of(_per_token(samples, "depths")),
        "passes_saved": _saved(_per_token(samples, "passes"), loops),
        "rows_saved": _saved(_per_token(samples, "rows"), loops),
    }
    return HumanEvalRow.model_validate(
        {
            **run.conditions.model_dump(),
            **figures,
            "time": datetime.now(timezone.utc).isoformat(),
            "exit_config": run.settings.exit_config,
            "temperature": run.settings.temperature,
            "seed": run.settings.seed,
            "stop": run.settings.stop,
            "strip_prompt": run.settings.strip_prompt,
            "samples": run.samples,
            "sample_commits": commits,
            "timeout_s": limits.timeout_s,
            "memory_mb": limits.memory_mb,
            "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES},
            "unfinished": sum(not sample.finished for sample in each),
            "new_tokens": sum(sample.new_tokens for sample in each),
        }
    )


def _solved(passed: Sequence[int]) -> Estimate:
    return share(sum(count > 0 for count in passed), len(passed))


def _per_token(samples: Sequence[Sequence[Sample]], name: str) -> Estimate | None:
    """A sum of the loops over the tokens after each first; None without loops, or without such tokens."""
    spent = [[getattr(sample, name) for sample in row] for row in samples]
    if any(value is None for row in spent for value in row):
        return None
    tokens = [sum(sample.new_tokens - 1 for sample in row) for row in samples]
    return ratio([sum(row) for row in spent], tokens)


def _saved(spent: Estimate | None, total_loops: int) -> Figure | None:
    """1 - what was spent for each token over T."""
    if spent is None:
        return None
    low, high = spent.interval
    return Figure(value=1 - spent.value / total_loops, low=1 - high / total_loops, high=1 - low / total_loops)
