"""Rows of the trade-off as tables: in the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.console import Console

from sigma0.bench.core.ledger import FidelityRow, Figure
from sigma0.bench.core.tables import BenchTable

COLUMNS = (
    "rule",
    "after",
    "promised",
    "new tokens",
    "all tokens",
    "KL",
    "same text",
    "right",
    "depth",
    "depth_saved",
    "passes_saved",
    "rows_saved",
    "of oracle",
    "head rows",
    "speed",
)
# What the short table leaves out.
_LONG = ("all tokens", "KL", "depth", "depth_saved")
SHORT_COLUMNS = tuple(column for column in COLUMNS if column not in _LONG)


def oracle_share(row: FidelityRow, rows: Sequence[FidelityRow]) -> float | None:
    """Passes saved over those that the oracle saves; None where the oracle is not among the rows."""
    best = next((each.passes_saved for each in rows if each.mode == "oracle"), None)
    if best is None or row.passes_saved is None or best.value <= 0:
        return None
    return row.passes_saved.value / best.value


def cells(row: FidelityRow, rows: Sequence[FidelityRow]) -> list[str]:
    """One row as text, column by column."""
    return [
        label(row),
        row.after_exit,
        "-" if row.promise is None else f"{100 * row.promise.agreement:g} %",
        percent(row.agreement_on_answers),
        percent(row.agreement),
        f"{row.kl.value:.4f}",
        percent(row.exact_match),
        percent(row.accuracy),
        "-" if row.mean_depth is None else f"{row.mean_depth.value:.2f}",
        percent(row.depth_saved),
        percent(row.passes_saved),
        percent(row.rows_saved),
        share_text(oracle_share(row, rows)),
        "-" if row.new_tokens <= row.n else f"{row.head_rows / (row.new_tokens - row.n):.2f}",
        "-" if row.speed_ratio is None else f"{row.speed_ratio.value:.2f}",
    ]


def label(row: FidelityRow) -> str:
    """A mode and its parameters."""
    settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
    return f"{row.mode} ({settings})" if settings else row.mode


def percent(figure: Figure | None) -> str:
    """A share without its interval."""
    return share_text(None if figure is None else figure.value)


def share_text(value: float | None) -> str:
    """A share in per cent, - where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def with_interval(figure: Figure | None) -> str:
    """A share and its interval."""
    return "-" if figure is None else f"{100 * figure.value:.1f} % ({100 * figure.low:.1f} to {100 * figure.high:.1f})"


def print_rows(rows: Sequence[FidelityRow]) -> None:
    """Prints all rows of a run."""
    first = rows[0]
    title = f"{first.model}, {first.n} prompts ({first.prompts}), {first.dtype}"
    table = BenchTable(COLUMNS, [cells(row, rows) for row in rows], title, left=COLUMNS[:2])
    Console(width=max(Console().width, 180)).print(table.rich(no_wrap=("rule",)))


def markdown(
    rows: Sequence[FidelityRow],
    of: Sequence[FidelityRow],
    intervals: bool = False,
    columns: Sequence[str] = COLUMNS,
) -> str:
    """Rows as a Markdown table.

    Args:
        rows: What to show.
        of: All rows of the run, the oracle's among them.
        intervals: Whether all shares carry theirs; that of the new tokens always does.
        columns: Some of `COLUMNS`, in their order.
    """
    lines = []
    for row in rows:
        named = dict(zip(COLUMNS, cells(row, of), strict=True))
        if intervals:
            shares = {
                "new tokens": row.agreement_on_answers,
                "all tokens": row.agreement,
                "same text": row.exact_match,
                "right": row.accuracy,
                "depth_saved": row.depth_saved,
                "passes_saved": row.passes_saved,
                "rows_saved": row.rows_saved,
            }
            named |= {column: with_interval(share) for column, share in shares.items()}
            if row.speed_ratio is not None:
                named["speed"] += f" ({row.speed_ratio.low:.2f} to {row.speed_ratio.high:.2f})"
        else:
            named["new tokens"] = with_interval(row.agreement_on_answers)
        lines.append([named[column] for column in columns])
    return BenchTable(columns, lines, left=COLUMNS[:2]).markdown()


def calibrated(rows: Sequence[FidelityRow]) -> list[FidelityRow]:
    """The rows of a run at calibrated thresholds, the one that saves most passes first, and the oracles."""
    # of a rule that was calibrated anew between two starts the last is shown
    latest = {(row.mode, row.after_exit): row for row in rows if row.promise is not None}
    promised = [row for row in latest.values() if row.passes_saved is not None]
    oracles = [row for row in rows if row.mode in ("oracle", "settled")]
    best: dict[str, float] = {}
    for row in promised:
        if row.passes_saved is not None:
            best[row.mode] = max(best.get(row.mode, row.passes_saved.value), row.passes_saved.value)
    return [*sorted(promised, key=lambda row: -best[row.mode]), *oracles]
