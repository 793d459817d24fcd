"""Levels in a table, for the terminal and for Markdown, and in a picture of accuracy against cost."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.output import BenchTable, drawing
from sigma0.bench.core.rows import StrategyQARow
from sigma0.bench.fidelity.table import with_interval
from sigma0.bench.strategyqa.measure import FEW

HEADINGS = (
    *("level", "n", "right", "difference", "p", "p, Holm", "missed"),
    *("calls an item", "tokens an item", "passes an item", "seconds an item", "doors", "labels"),
)


def name(row: StrategyQARow) -> str:
    """A level with what it was made with."""
    return f"{row.level} ({row.variant})" if row.variant else row.level


def doors(row: StrategyQARow) -> str:
    """Doors that verdicts on a level's answers opened, each with how often; "" where there are no verdicts."""
    return ", ".join(f"{door} {count}" for door, count in sorted(row.doors.items()))


def p_text(value: float | None) -> str:
    """A p-value in two digits; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.005 else "< 0.01"


def cells(row: StrategyQARow) -> tuple[str, ...]:
    """A level's cells."""
    return (
        name(row),
        str(row.n),
        with_interval(row.accuracy),
        "-" if row.difference is None else f"{100 * row.difference:+.1f}",
        p_text(row.p_value),
        p_text(row.p_holm),
        str(sum(row.misses.values())),
        f"{row.calls:.1f}",
        f"{row.completion_tokens / row.n:.0f}",
        f"{row.loop_passes / row.n:.0f}" if row.loop_passes else "-",
        f"{row.seconds / row.n:.1f}",
        doors(row) or "-",
        row.labels,
    )


def markdown(rows: Sequence[StrategyQARow]) -> str:
    """The table for a page of results."""
    return BenchTable(HEADINGS, [cells(row) for row in rows], left=("level", "labels")).markdown()


def latest_levels(rows: Sequence[AnyRow]) -> list[list[StrategyQARow]]:
    """The rows of the last run of each model on each set of items, in the order of their measurement.

    What was held against another level than the rest is a run of its own: a distillation.
    """
    runs: dict[tuple[str, str, str], list[StrategyQARow]] = {}
    for row in rows:
        if isinstance(row, StrategyQARow):
            runs.setdefault((row.time, row.model, row.prompts), []).append(row)
    latest = {(model, prompts, run[0].n, run[0].against): run for (_, model, prompts), run in sorted(runs.items())}
    return sorted(latest.values(), key=lambda run: run[0].time)


def whole(rows: Sequence[StrategyQARow]) -> str:
    """The table of one run with what it was measured on, and what its noise is."""
    first = rows[0]
    few = f" With {first.n} items differences of 10 points are noise." if first.n < FEW else ""
    return (
        f"{first.named} on {first.n} items of {first.prompts}: {first.max_new_tokens} new tokens an answer at "
        f"most, effort {first.effort}, temperature {first.temperature:g}, {first.dtype}, {first.device}. Differences "
        f"are in points, against {first.against} on the same items; always saying the commoner label scores "
        f"{100 * first.majority:.1f} %. Seconds of a batch are shared by its questions.{few}\n\n{markdown(rows)}"
    )


def table(rows: Sequence[StrategyQARow]) -> Table:
    """The table for a terminal: what is narrow, or cannot be left out."""
    title = f"{rows[0].model} on {rows[0].prompts}, differences against {rows[0].against}"
    caption = f"{rows[0].n} items; p by Holm; calls, tokens and passes of one item"
    found = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0))
    found.add_column("level", overflow="fold", min_width=11)
    for heading in ("right", "diff.", "p", "missed", "calls", "tokens", "passes"):
        found.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        level, _, right, difference, _, p_holm, missed, calls, tokens, passes, *_ = cells(row)
        found.add_row(level, right, difference, p_holm, missed, calls, tokens, passes)
    return found


def draw(rows: Sequence[StrategyQARow], path: Path) -> None:
    """Accuracy with its interval against tokens written for each item, as .svg or .png."""
    with drawing([path], (7.5, 4.5), dpi=100) as figure:
        axes = figure.subplots()
        for row in rows:
            tokens, found = row.completion_tokens / row.n, row.accuracy
            spread = [[found.value - found.low], [found.high - found.value]]
            axes.errorbar([tokens], [found.value], yerr=spread, fmt="o", capsize=3)
            axes.annotate(name(row), (tokens, found.value), textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.axhline(rows[0].majority, color="#888888", linestyle="--", label="always the commoner label")
        axes.set_xscale("log")
        axes.set_xlabel("tokens written for an item")
        axes.set_ylabel("right answers, 95 % intervals")
        axes.set_title(f"{rows[0].model}: {rows[0].prompts}", fontsize=9)
        axes.legend(fontsize=8)
