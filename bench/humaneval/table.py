"""Judged samples as a row of the ledger, and such rows in a table, for the terminal and for Markdown."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

import numpy as np
from rich.table import Table

from sigma0.bench.core.conditions import Figure, utc_now
from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.core.rows import AnyRow, HumanEvalRow, Outcome
from sigma0.bench.humaneval.judging import Judgement, Limits
from sigma0.bench.humaneval.sampling import Run, Sample
from sigma0.calibrate.bootstrap import Estimate, clustered_share, ratio, share
from sigma0.config import ExitConfig

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
KS = (1, 10, 100)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one that passed (Chen et al., 2021, equation 1).

    That is 1 - C(n - passed, k) / C(n, k), as a product whose factors lie between 0 and 1, for 1 <= k <= n.
    """
    if n - passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - passed + 1, n + 1)))


def estimates(n: int, passed: Sequence[int]) -> dict[int, Estimate]:
    """Mean pass@k over problems for each k in `KS` that n samples allow, by how many passed of each problem."""
    result, ones = {}, np.ones(len(passed))
    for k in KS:
        if k <= n:
            estimate = clustered_share([pass_at_k(n, item, k) for item in passed], ones, n * ones)
            assert estimate is not None
            result[k] = estimate
    return result


def row_of(
    run: Run,
    samples: Sequence[Sequence[Sample]],
    judged: Sequence[Sequence[Judgement]],
    limits: Limits,
    commits: tuple[str | None, ...],
) -> HumanEvalRow:
    """The row of a run: its samples of each problem, what became of them, and the commits that wrote them."""
    passed = [sum(item.outcome == "passed" for item in row) for row in judged]
    counts = Counter(item.outcome for row in judged for item in row)
    loops = run.conditions.total_loops
    item = [sample for row in samples for sample in row]
    figures = {
        "pass_at_k": {k: Figure.of(estimate) for k, estimate in estimates(run.samples, passed).items()},
        "solved": Figure.of(share(sum(count > 0 for count in passed), len(passed))),
        "mean_depth": Figure.of(_per_token(samples, "depths")),
        "passes_saved": _saved(_per_token(samples, "passes"), loops),
        "rows_saved": _saved(_per_token(samples, "rows"), loops),
    }
    return HumanEvalRow.model_validate(
        {
            **run.conditions.model_dump(),
            **figures,
            "time": utc_now(),
            **run.settings.model_dump(exclude={"dtype", "max_new_tokens"}),
            **asdict(limits),
            "samples": run.samples,
            "sample_commits": commits,
            "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES},
            "unfinished": sum(not sample.finished for sample in item),
            "new_tokens": sum(sample.new_tokens for sample in item),
        }
    )


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


LEFT = ("model", "exit", "prompts")


def latest_humaneval(rows: Sequence[AnyRow]) -> list[HumanEvalRow]:
    """The last row of each model and setting over as many problems, in the order they were judged."""
    mine = (row for row in rows if isinstance(row, HumanEvalRow))
    last = {_kind(row): row for row in sorted(mine, key=lambda row: row.time)}
    return sorted(last.values(), key=lambda row: row.time)


def _kind(row: HumanEvalRow) -> str:
    return json.dumps([row.model, row.dtype, row.device, row.prompts, row.n, row.max_new_tokens, row.key])


def cells(rows: Sequence[HumanEvalRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings, and the cells of each row."""
    ks = sorted({k for row in rows for k in row.pass_at_k})
    names = (*LEFT, "problems", "samples", *(f"pass@{k}" for k in ks), "solved", *OUTCOMES, "depth", "passes saved")
    lines = [
        (
            row.named,
            exit_name(row),
            "stripped" if row.strip_prompt else "as they are",
            str(row.n),
            str(row.samples),
            *(with_interval(row.pass_at_k.get(k)) for k in ks),
            with_interval(row.solved),
            *(str(row.outcomes[outcome]) for outcome in OUTCOMES),
            "-" if row.mean_depth is None else f"{row.mean_depth.value:.2f} of {row.total_loops}",
            with_interval(row.passes_saved),
        )
        for row in rows
    ]
    return names, lines


def markdown(rows: Sequence[HumanEvalRow]) -> str:
    """The table for a page."""
    names, lines = cells(rows)
    return BenchTable(names, lines, left=LEFT).markdown()


def table(row: HumanEvalRow) -> Table:
    """One row for a terminal, a figure a line."""
    names, (line,) = cells([row])
    title = f"HumanEval: {row.n} problems of {row.prompts}"
    lines = BenchTable(("figure", "value"), list(zip(names, line, strict=True)), title).rich(no_wrap=("figure",))
    lines.show_header = False
    return lines


def exit_name(row: HumanEvalRow) -> str:
    """The exit setting in a few words."""
    if row.exit_config is None:
        return "no loops"
    config = ExitConfig.parse(row.exit_config)
    values = {"fixed": config.depth, "qexit": config.q, "margin": config.theta}
    if config.mode == "full":
        return "full"
    return f"{config.mode} {values.get(config.mode, config.eps)}, {config.after_exit}"
