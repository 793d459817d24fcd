"""Rows of HumanEval in a table, for the terminal and for Markdown."""

import json
from collections.abc import Sequence

from rich.table import Table

from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.output import BenchTable
from sigma0.bench.core.rows import HumanEvalRow
from sigma0.bench.fidelity.table import with_interval
from sigma0.bench.humaneval.row import OUTCOMES
from sigma0.config import ExitConfig

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
