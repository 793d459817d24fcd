"""Rows of speed runs as tables: in the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sigma0.bench.ledger import Figure, SpeedRow

COLUMNS = (
    "way",
    "ms/token",
    "tokens/s",
    "passes/token",
    "rows/token",
    "full / this",
    "ideal",
    "of ideal",
    "GB/s of weights",
    "prompt tokens/s",
    "K/V MB",
    "reserved",
)


def cells(row: SpeedRow) -> list[str]:
    """One row as text, column by column."""
    return [
        row.way,
        f"{row.milliseconds_per_token.value:.4g}",
        f"{row.tokens_per_second.value:.4g}",
        f"{row.passes_per_token:.2f}",
        f"{row.rows_per_token:.2f}",
        _with_interval(row.speed_ratio, 2),
        f"{row.ideal:.2f}",
        "-" if row.share_of_ideal is None else f"{100 * row.share_of_ideal.value:.1f} %",
        f"{row.weight_bandwidth / 1e9:.1f}",
        f"{row.prompt_tokens_per_second:.4g}",
        f"{row.kv_bytes_in_use / 1e6:.4g}",
        f"{row.kv_bytes_allocated / 1e6:.4g}",
    ]


def conditions_text(row: SpeedRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    course = "" if row.course is None else f" Course: {row.course.source}, scaled to {row.total_loops} loops."
    commit = "unknown" if row.commit is None else row.commit[:12] + row.commit[40:]
    return (
        f"{row.model}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: batch {row.batch_size}, "
        f"context {row.context}, {row.max_new_tokens} new tokens, {row.rounds} rounds, {row.dtype}, {row.device}, "
        f"{row.threads} thread(s), {versions}, commit {commit}.{course}"
    )


def markdown(rows: Sequence[SpeedRow]) -> str:
    """A run as a Markdown table."""
    lines = [" | ".join(COLUMNS), "|".join(["---"] + ["---:"] * (len(COLUMNS) - 1))]
    lines += [" | ".join(cells(row)) for row in rows]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def print_speed(rows: Sequence[SpeedRow]) -> None:
    """The rows of a run in the terminal."""
    told = next((row for row in rows if row.course is not None), rows[0])
    table = Table(title=conditions_text(told), title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    Console().print(f"most memory in use: {max(row.peak_bytes for row in rows) / 1e9:.2f} GB")


def _with_interval(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return "-"
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f}-{figure.high:.{digits}f})"
