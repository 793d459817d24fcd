"""Rows of a load run as Markdown."""

from collections.abc import Callable, Mapping, Sequence

from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.core.rows import AnyRow, ServeRow


def latest_load(rows: Sequence[AnyRow], way: str) -> list[ServeRow]:
    """The rows of the last load run that measured a way."""
    result = [row for row in rows if isinstance(row, ServeRow)]
    times = [row.time for row in result if row.way == way]
    return [row for row in result if row.time == times[-1]]


def never_rows(rows: Sequence[AnyRow]) -> list[ServeRow]:
    """`never` beside `full` alone, as runs that ask for just these two have it; by load."""
    result = [row for row in rows if isinstance(row, ServeRow)]
    others = {row.time for row in result if row.way not in ("full", "never")}
    alone = {(row.load, row.amount): row for row in result if row.way == "never" and row.time not in others}
    return [alone[load] for load in sorted(alone)]


COLUMNS: Mapping[str, Callable[[ServeRow], str]] = {
    "load": lambda row: f"{row.amount:g} {'clients' if row.load == 'closed' else 'requests/s'}",
    "way": lambda row: row.way,
    "tokens/s": lambda row: f"{row.tokens_per_second.value:,.0f}",
    "of `full`, least to greatest": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "rows/s": lambda row: "-" if row.rows_per_second is None else f"{row.rows_per_second:,.0f}",
    "passes/s": lambda row: "-" if row.passes_per_second is None else f"{row.passes_per_second:,.0f}",
    "first token, ms": lambda row: f"{row.first_token_ms.p50:,.0f} / {row.first_token_ms.p99:,.0f}",
    "between, ms": lambda row: f"{row.between_tokens_ms.p50:,.0f} / {row.between_tokens_ms.p99:,.0f}",
}


def load_table(rows: Sequence[ServeRow]) -> str:
    """Every way of one run under every load."""
    return BenchTable.of(COLUMNS, rows, left=("load", "way")).markdown()
