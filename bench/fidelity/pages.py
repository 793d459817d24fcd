"""The latest run of each model as Markdown: whole pages, and the short tables that texts show."""

from collections.abc import Sequence

from sigma0.bench.core.rows import AnyRow, FidelityRow
from sigma0.bench.fidelity.grid import GRID
from sigma0.bench.fidelity.table import SHORT_COLUMNS, calibrated, markdown


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
    "calibrated on the calibration split."
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
