"""Rows of a load run as Markdown."""

from collections.abc import Sequence

from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.output import BenchTable
from sigma0.bench.core.rows import ServeRow


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


def load_table(rows: Sequence[ServeRow]) -> str:
    """Every way under every load.

    Args:
        rows: Of one run.
    """
    figures = ("tokens/s", "of `full`, least to greatest", "rows/s", "passes/s", "first token, ms", "between, ms")
    return BenchTable(("load", "way", *figures), [_cells(row) for row in rows], left=("load", "way")).markdown()


def _cells(row: ServeRow) -> list[str]:
    unit = "clients" if row.load == "closed" else "requests/s"
    ratio = f"{row.speed_ratio.value:.2f} ({row.speed_ratio.low:.2f} to {row.speed_ratio.high:.2f})"
    rates = ["-" if rate is None else f"{rate:,.0f}" for rate in (row.rows_per_second, row.passes_per_second)]
    times = [f"{tail.p50:,.0f} / {tail.p99:,.0f}" for tail in (row.first_token_ms, row.between_tokens_ms)]
    return [f"{row.amount:g} {unit}", row.way, f"{row.tokens_per_second.value:,.0f}", ratio, *rates, *times]
