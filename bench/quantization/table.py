"""Rows about quantised weights as tables: in the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.console import Console

from sigma0.bench.core.conditions import short_commit
from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.output import BenchTable
from sigma0.bench.core.rows import QuantizationRow
from sigma0.bench.fidelity.table import percent, with_interval

COLUMNS = (
    "rule",
    "weights",
    "block MB",
    "model MB",
    "ms/token",
    "faster",
    "agreement",
    "KL",
    "same text",
    "depth",
)


def cells(row: QuantizationRow, intervals: bool = False) -> list[str]:
    """One row as text, column by column; where two figures stand, the second is that of floats."""
    settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
    ratio = row.speed_ratio
    both = (row.mean_depth, row.mean_depth_of_floats)
    return [
        f"{row.mode} ({settings})" if settings else row.mode,
        str(row.quantization),
        f"{row.block_bytes / 1e6:.2f} / {row.block_bytes_of_floats / 1e6:.2f}",
        f"{row.model_bytes / 1e6:.2f} / {row.model_bytes_of_floats / 1e6:.2f}",
        f"{row.milliseconds_per_token:.3g} / {row.milliseconds_per_token_of_floats:.3g}",
        f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        with_interval(row.agreement) if intervals else percent(row.agreement),
        "-" if row.kl is None else f"{row.kl.value:.4f}",
        with_interval(row.exact_match) if intervals else percent(row.exact_match),
        "-" if None in both else " / ".join(f"{depth.value:.2f}" for depth in both if depth is not None),
    ]


def conditions_text(row: QuantizationRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    asked = (
        "random weights, of which bytes and time alone mean something"
        if row.agreement is None
        else f"{row.n} prompts ({row.prompts}), at most {row.max_new_tokens} new tokens"
    )
    return (
        f"{row.named}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: {asked}; timed: "
        f"{row.runner}, context {row.context}, {row.timed_tokens} new tokens, {row.rounds} interleaved rounds, batch "
        f"{row.batch_size}, {row.dtype} beside floats of {row.dtype_of_floats}, {row.device}, {row.threads} thread(s), "
        f"{versions}, commit {short_commit(row.commit)}."
    )


def whole(rows: Sequence[QuantizationRow]) -> str:
    """A run with its conditions, as Markdown."""
    table = BenchTable(COLUMNS, [cells(row, intervals=True) for row in rows], left=COLUMNS[:2]).markdown()
    return f"{conditions_text(rows[0])}\n\n{table}"


def print_rows(rows: Sequence[QuantizationRow]) -> None:
    """The rows of a run in the terminal."""
    table = BenchTable(COLUMNS, [cells(row) for row in rows], conditions_text(rows[0]), left=COLUMNS[:2])
    Console(width=max(Console().width, 180)).print(table.rich(no_wrap=COLUMNS, compact=True))
    Console().print("second figures: with floats; faster: their time over that of quantised weights")


def latest_quantization(rows: Sequence[AnyRow]) -> list[list[QuantizationRow]]:
    """The latest row of each rule and quantisation, by model, runner and dtype of the floats."""
    latest: dict[tuple[str, ...], dict[tuple[str, str | None], QuantizationRow]] = {}
    for row in sorted((row for row in rows if isinstance(row, QuantizationRow)), key=lambda row: row.time):
        latest.setdefault((row.model, row.runner, row.dtype_of_floats), {})[row.mode, row.quantization] = row
    return [list(run.values()) for _, run in sorted(latest.items())]
