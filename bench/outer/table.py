"""The table of `python -m sigma0.bench outer`, for the terminal and for its page."""

from collections.abc import Callable, Mapping, Sequence

from sigma0.bench.core.conditions import Figure
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.core.rows import LevelRates, OuterRow


def points(figure: Figure) -> str:
    """A share or a difference of shares in points, with its interval."""
    return with_interval(figure, unit="")


# Of a way; `beats` has the points that it has right more than others, with their names.
COLUMNS: Mapping[str, Callable[[OuterRow], str]] = {
    "model": lambda row: row.named,
    "way": lambda row: row.way,
    "right, %": lambda row: points(row.right),
    "wrong accepted, %": lambda row: points(row.accepted_wrong),
    "accepted, %": lambda row: points(row.accepted),
    "cost": lambda row: f"{row.cost:.0f}",
    "tokens": lambda row: f"{row.completion_tokens:.0f}",
    "questions": lambda row: f"{row.calls:.1f}",
    "ms": lambda row: f"{1000 * row.seconds:.0f}",
    "beats": lambda row: "; ".join(f"{name}: {points(more)}" for name, more in row.beats.items()),
}
# Of a level of verification that a way with progressive effort reached.
LEVEL_COLUMNS: Mapping[str, Callable[[LevelRates], str]] = {
    "reached": lambda rates: str(rates.reached),
    "passed it, %": lambda rates: points(rates.passed),
    "checks of each": lambda rates: f"{rates.checks / rates.reached:.1f}",
    "checks passed, %": lambda rates: points(rates.checks_passed),
}


def table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each way."""
    return BenchTable.of(COLUMNS, rows, f"{rows[0].n} questions: {rows[0].prompts}", ("model", "way", "beats"))


def levels_table(rows: Sequence[OuterRow]) -> BenchTable:
    """A row for each level that a way with progressive effort reached; none of other ways."""
    levels = [(row.way, level, rates) for row in rows for level, rates in row.levels.items()]
    cells = [[way, level, *(column(rates) for column in LEVEL_COLUMNS.values())] for way, level, rates in levels]
    return BenchTable(("way", "level", *LEVEL_COLUMNS), cells, "By level of verification", left=("way", "level"))


def latest_outer(rows: Sequence[object]) -> list[list[OuterRow]]:
    """The latest run of each first model and command, its rows in the order they were measured."""
    runs = runs_of(rows, OuterRow, lambda row: row.time)
    # a run of ways begins with the plain answer, one of a program or an agent with that
    return list({(run[0].model, run[0].way.split()[0]): run for run in runs.values()}.values())
