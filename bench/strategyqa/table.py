"""Levels in a table, for the terminal and for Markdown, and in a picture of accuracy against cost."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from sigma0.bench.ledger import AnyRow, StrategyQARow
from sigma0.bench.strategyqa.measure import FEW
from sigma0.extras import needs_extra

HEADINGS = (
    "level",
    "n",
    "right",
    "against L0",
    "p",
    "p, Holm",
    "no answer",
    "calls an item",
    "tokens an item",
    "labels",
)


def cells(row: StrategyQARow) -> tuple[str, ...]:
    """A level's cells."""
    figure = row.accuracy
    return (
        row.level,
        str(row.n),
        f"{100 * figure.value:.1f} % ({100 * figure.low:.1f} to {100 * figure.high:.1f})",
        "-" if row.difference is None else f"{100 * row.difference:+.1f}",
        "-" if row.p_value is None else f"{row.p_value:.2f}",
        "-" if row.p_holm is None else f"{row.p_holm:.2f}",
        str(sum(row.misses.values())),
        f"{row.calls:.1f}",
        f"{row.completion_tokens / row.n:.0f}",
        row.labels,
    )


def markdown(rows: Sequence[StrategyQARow]) -> str:
    """The table for a README."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|" + "---:|" * (len(HEADINGS) - 2) + "---|"]
    return "\n".join([*lines, *("| " + " | ".join(cells(row)) + " |" for row in rows)])


def latest_levels(rows: Sequence[AnyRow]) -> list[list[StrategyQARow]]:
    """The rows of the last run of each model on each set of items, in the order of their measurement."""
    runs: dict[tuple[str, str, str], list[StrategyQARow]] = {}
    for row in rows:
        if isinstance(row, StrategyQARow):
            runs.setdefault((row.time, row.model, row.prompts), []).append(row)
    latest = {(model, prompts, run[0].n): run for (_, model, prompts), run in sorted(runs.items())}
    return sorted(latest.values(), key=lambda run: run[0].time)


def whole(rows: Sequence[StrategyQARow]) -> str:
    """The table of one run with what it was measured on, and what its noise is."""
    first = rows[0]
    few = f" With {first.n} items differences of 10 points are noise." if first.n < FEW else ""
    return (
        f"{first.model} on {first.n} items of {first.prompts}: {first.max_new_tokens} new tokens an answer at "
        f"most, effort {first.effort}, temperature {first.temperature:g}, {first.dtype}, {first.device}; always saying "
        f"the commoner label scores {100 * first.majority:.1f} %.{few}\n\n{markdown(rows)}"
    )


def table(rows: Sequence[StrategyQARow]) -> Table:
    """The table for a terminal."""
    found = Table(title=f"{rows[0].model} on {rows[0].prompts}")
    for name in HEADINGS:
        found.add_column(name, justify="left" if name in ("level", "labels") else "right", no_wrap=name == "level")
    for row in rows:
        found.add_row(*cells(row))
    return found


def draw(rows: Sequence[StrategyQARow], path: Path) -> None:
    """Accuracy with its interval against tokens written for each item, as .svg or .png."""
    with needs_extra("bench"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        tokens, found = row.completion_tokens / row.n, row.accuracy
        spread = [[found.value - found.low], [found.high - found.value]]
        axes.errorbar([tokens], [found.value], yerr=spread, fmt="o", capsize=3)
        axes.annotate(row.level, (tokens, found.value), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.axhline(rows[0].majority, color="#888888", linestyle="--", label="always the commoner label")
    axes.set_xscale("log")
    axes.set_xlabel("tokens written for an item")
    axes.set_ylabel("right answers, 95 % intervals")
    axes.set_title(f"{rows[0].model}: {rows[0].prompts}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
