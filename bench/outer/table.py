"""The table of `python -m sigma0.bench outer`, for the terminal and for its page."""

from collections.abc import Sequence

from sigma0.bench.core.ledger import Figure, OuterRow
from sigma0.bench.core.tables import BenchTable

HEADINGS = (
    "model",
    "way",
    "right, %",
    "wrong accepted, %",
    "accepted, %",
    "cost",
    "tokens",
    "questions",
    "ms",
    "beats",
)
LEVEL_HEADINGS = ("way", "level", "reached", "passed it, %", "checks of each", "checks passed, %")


def table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each way; `beats` has the points that it has right more than others, with their names."""
    cells = [
        (
            row.named,
            row.way,
            percent(row.right),
            percent(row.accepted_wrong),
            percent(row.accepted),
            f"{row.cost:.0f}",
            f"{row.completion_tokens:.0f}",
            f"{row.calls:.1f}",
            f"{1000 * row.seconds:.0f}",
            "; ".join(f"{name}: {percent(points)}" for name, points in row.beats.items()),
        )
        for row in rows
    ]
    title = f"{rows[0].n} questions: {rows[0].prompts}"
    return BenchTable(HEADINGS, cells, title, left=("model", "way", "beats"))


def levels_table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each level of verification that a way with progressive effort reached; none of other ways."""
    cells = [
        (
            row.way,
            level,
            str(rates.reached),
            percent(rates.passed),
            f"{rates.checks / rates.reached:.1f}",
            percent(rates.checks_passed),
        )
        for row in rows
        for level, rates in row.levels.items()
    ]
    return BenchTable(LEVEL_HEADINGS, cells, "By level of verification", left=("way", "level"))


def latest_outer(rows: Sequence[object]) -> list[list[OuterRow]]:
    """The latest run of each first model and command, its rows in the order they were measured."""
    runs: dict[str, list[OuterRow]] = {}
    for row in rows:
        if isinstance(row, OuterRow):
            runs.setdefault(row.time, []).append(row)
    # a run of ways begins with the plain answer, one of a program or an agent with that
    return list({(run[0].model, run[0].way.split()[0]): run for run in runs.values()}.values())


def percent(figure: Figure) -> str:
    """A share or a difference of shares, with its interval."""
    return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"
