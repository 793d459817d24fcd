"""Rows about quantised weights as tables: in the terminal, and as Markdown."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, percent, with_interval
from sigma0.bench.core.rows import AnyRow, QuantizationRow
from sigma0.bench.fidelity.table import label

COLUMNS: Mapping[str, Callable[[QuantizationRow], str]] = {
    "rule": label,
    "weights": lambda row: str(row.quantization),
    "block MB": lambda row: f"{row.block_bytes / 1e6:.2f} / {row.block_bytes_of_floats / 1e6:.2f}",
    "model MB": lambda row: f"{row.model_bytes / 1e6:.2f} / {row.model_bytes_of_floats / 1e6:.2f}",
    "ms/token": lambda row: f"{row.milliseconds_per_token:.3g} / {row.milliseconds_per_token_of_floats:.3g}",
    "faster": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "agreement": lambda row: percent(row.agreement),
    "KL": lambda row: "-" if row.kl is None else f"{row.kl.value:.4f}",
    "same text": lambda row: percent(row.exact_match),
    "depth": lambda row: (
        f"{row.mean_depth.value:.2f} / {row.mean_depth_of_floats.value:.2f}"
        if row.mean_depth and row.mean_depth_of_floats
        else "-"
    ),
}
# of a page, which has room for intervals
WIDE: Mapping[str, Callable[[QuantizationRow], str]] = {
    **COLUMNS,
    "agreement": lambda row: with_interval(row.agreement),
    "same text": lambda row: with_interval(row.exact_match),
}
LEFT = ("rule", "weights")


def conditions_text(row: QuantizationRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    asked = (
        "random weights, of which bytes and time alone mean something"
        if row.agreement is None
        else f"{row.n} prompts ({row.prompts}), at most {row.max_new_tokens} new tokens"
    )
    return (
        f"{row.named}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: {asked}; timed: "
        f"{row.runner}, context {row.context}, {row.timed_tokens} new tokens, {row.rounds} interleaved rounds, batch "
        f"{row.batch_size}, {row.dtype} beside floats of {row.dtype_of_floats}, {row.device}, {row.threads} thread(s), "
        f"{row.code}."
    )


def whole(rows: Sequence[QuantizationRow]) -> str:
    """A run with its conditions, as Markdown."""
    return f"{conditions_text(rows[0])}\n\n{BenchTable.of(WIDE, rows, left=LEFT).markdown()}"


def print_rows(rows: Sequence[QuantizationRow]) -> None:
    """The rows of a run in the terminal."""
    BenchTable.of(COLUMNS, rows, conditions_text(rows[0]), LEFT).show(no_wrap=COLUMNS, compact=True, width=180)
    Console().print("second figures: with floats; faster: their time over that of quantised weights")


def latest_quantization(rows: Sequence[AnyRow]) -> list[list[QuantizationRow]]:
    """The latest row of each rule and quantisation, by model, runner and dtype of the floats."""
    runs = runs_of(rows, QuantizationRow, lambda row: (row.model, row.runner, row.dtype_of_floats))
    return [
        list({(row.mode, row.quantization): row for row in sorted(run, key=lambda row: row.time)}.values())
        for _, run in sorted(runs.items())
    ]
