"""Rows of the trade-off as tables: in the terminal, as whole Markdown pages, and as the short tables of texts."""

from collections.abc import Sequence

from sigma0.bench.core.output import BenchTable, percent, with_interval
from sigma0.bench.core.rows import AnyRow, FidelityRow, QuantizationRow
from sigma0.bench.fidelity.grid import GRID

# Columns that are shares, and the figures in them.
_SHARES = {
    "new tokens": "agreement_on_answers",
    "all tokens": "agreement",
    "same text": "exact_match",
    "right": "accuracy",
    "depth_saved": "depth_saved",
    "passes_saved": "passes_saved",
    "rows_saved": "rows_saved",
}
COLUMNS = (
    *("rule", "after", "promised", "new tokens", "all tokens", "KL", "same text", "right", "depth"),
    *("depth_saved", "passes_saved", "rows_saved", "of oracle", "head rows", "speed"),
)
# What the short table leaves out.
_LONG = ("all tokens", "KL", "depth", "depth_saved")
SHORT_COLUMNS = tuple(column for column in COLUMNS if column not in _LONG)


def oracle_share(row: FidelityRow, rows: Sequence[FidelityRow]) -> float | None:
    """Passes saved over those that the oracle saves; None where the oracle is not among the rows."""
    best = next((item.passes_saved for item in rows if item.mode == "oracle"), None)
    if best is None or row.passes_saved is None or best.value <= 0:
        return None
    return row.passes_saved.value / best.value


def _cells(row: FidelityRow, of: Sequence[FidelityRow], with_intervals: Sequence[str] = ()) -> dict[str, str]:
    """One row as text, by column; some columns show intervals."""
    share = oracle_share(row, of)
    cells = {
        "rule": label(row),
        "after": row.after_exit,
        "promised": "-" if row.promise is None else f"{100 * row.promise.agreement:g} %",
        "KL": f"{row.kl.value:.4f}",
        "depth": "-" if row.mean_depth is None else f"{row.mean_depth.value:.2f}",
        "of oracle": "-" if share is None else f"{100 * share:.1f} %",
        "head rows": "-" if row.new_tokens <= row.n else f"{row.head_rows / (row.new_tokens - row.n):.2f}",
        "speed": with_interval(row.speed_ratio, 2, 1, ""),
    }
    if "speed" not in with_intervals:
        cells["speed"] = cells["speed"].partition(" ")[0]
    for column, name in _SHARES.items():
        cells[column] = (with_interval if column in with_intervals else percent)(getattr(row, name))
    return cells


def label(row: FidelityRow | QuantizationRow) -> str:
    """A mode and its parameters."""
    settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
    return f"{row.mode} ({settings})" if settings else row.mode


def print_rows(rows: Sequence[FidelityRow]) -> None:
    """Prints all rows of a run."""
    first = rows[0]
    title = f"{first.model}, {first.n} prompts ({first.prompts}), {first.dtype}"
    lines = [[cells[column] for column in COLUMNS] for cells in (_cells(row, rows) for row in rows)]
    BenchTable(COLUMNS, lines, title, left=COLUMNS[:2]).show(no_wrap=COLUMNS)


def markdown(
    rows: Sequence[FidelityRow], of: Sequence[FidelityRow], intervals: bool = False, columns: Sequence[str] = COLUMNS
) -> str:
    """Rows of a run, `of` all of its rows, as a Markdown table of some of `COLUMNS`.

    All shares carry intervals, or that of the new tokens alone.
    """
    shown = COLUMNS if intervals else ("new tokens",)
    lines = [[cells[column] for column in columns] for cells in (_cells(row, of, shown) for row in rows)]
    return BenchTable(columns, lines, left=COLUMNS[:2]).markdown()


def calibrated(rows: Sequence[FidelityRow]) -> list[FidelityRow]:
    """The rows of a run at calibrated thresholds, the one that saves most passes first, and the oracles."""
    # of a rule that was calibrated anew between two starts the last is shown
    latest = {(row.mode, row.after_exit): row for row in rows if row.promise is not None}
    saved = [(row, row.passes_saved.value) for row in latest.values() if row.passes_saved is not None]
    best = {row.mode: max(value for item, value in saved if item.mode == row.mode) for row, _ in saved}
    oracles = [row for row in rows if row.mode in ("oracle", "settled")]
    return [*sorted((row for row, _ in saved), key=lambda row: -best[row.mode]), *oracles]


def latest_runs(rows: Sequence[AnyRow]) -> dict[str, list[AnyRow]]:
    """The rows of the run of each model that was measured last, by a name fit for a file."""
    last: dict[str, str] = {}
    for row in sorted((row for row in rows if isinstance(row, FidelityRow)), key=lambda row: row.time):
        last[row.model] = row.run
    result: dict[str, list[AnyRow]] = {}
    for model, run in last.items():
        name = model.strip("/").replace("/", "--")
        if name in result:
            raise ValueError(f"two models in the ledger would both be called {name!r} in file names")
        result[name] = [row for row in rows if row.run == run]
    return result


def conditions_text(row: FidelityRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    return (
        f"{row.named}: {row.n} prompts ({row.prompts}), at most {row.max_new_tokens} new tokens, batch "
        f"{row.batch_size}, {row.dtype}, {row.device}, {row.threads} thread(s), {row.code}."
    )


CHOSEN_BEFOREHAND = (
    "No threshold was chosen on the prompts of this page: the grid was set beforehand, and those with a promise were "
    "calibrated on prompts set apart."
)


def whole_table(rows: Sequence[FidelityRow]) -> str:
    """Every row of a run with its intervals, as a Markdown page."""
    where = f"{conditions_text(rows[0])} {CHOSEN_BEFOREHAND}"
    return f"# {rows[0].model}\n\n{where}\n\n{markdown(rows, rows, intervals=True)}\n"


def short_table(rows: Sequence[FidelityRow]) -> str:
    """Each rule at its calibrated threshold, and the oracles, as Markdown."""
    first = rows[0]
    without = sorted({row.mode for row in rows} & set(GRID) - {row.mode for row in rows if row.promise is not None})
    missing = (
        f" Not measured at one: {', '.join(without)} (`sigma0 calibrate {first.model} --exit all --prompts FILE` finds "
        "and stores them, and the next run measures them)."
        if without
        else ""
    )
    table = markdown(calibrated(rows), rows, columns=SHORT_COLUMNS)
    return (
        f'{conditions_text(first)} Thresholds were calibrated beforehand, on other prompts; "promised" is the share of '
        f"new tokens that each is to keep.{missing}\n\n{table}"
    )
