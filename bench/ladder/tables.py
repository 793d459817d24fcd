"""Rows of a ladder's run as Markdown: both models alone, and one setting of each curve."""

from collections.abc import Sequence

from sigma0.bench.core.ledger import AnyRow, Figure, LadderRow
from sigma0.bench.core.tables import BenchTable
from sigma0.bench.ladder.measure import LARGE, SMALL

SHARE = 0.95


def ladder_runs(rows: Sequence[AnyRow]) -> dict[str, list[LadderRow]]:
    """The rows of each run, by the time that it began."""
    runs: dict[str, list[LadderRow]] = {}
    for row in rows:
        if isinstance(row, LadderRow):
            runs.setdefault(row.time, []).append(row)
    return runs


def ladder_table(rows: Sequence[LadderRow]) -> str:
    """Both models alone, then of each curve the cheapest setting with 95 % of the larger model's accuracy.

    A curve that reaches it nowhere shows its most accurate setting. A sentence before the table says on which questions
    the settings were chosen.

    Args:
        rows: Of one run.
    """
    choosing = next((row for row in rows if row.part == "choice"), None)
    told = "these very questions" if choosing is None else f"{choosing.n} questions of their own ({choosing.prompts})"
    headings = ("setting", "right, 95 % interval", "cost", "time", "tokens of the larger", "catch-ups an answer")
    table = BenchTable(headings, [_cells(row) for row in shown(rows)])
    return f"Settings are chosen on {told}.\n\n{table.markdown()}"


def shown(rows: Sequence[LadderRow]) -> list[LadderRow]:
    """The rows that `ladder_table` tells: reported on one set of questions, chosen on the other where there is one."""
    reported = [row for row in rows if row.part == "report"]
    choosing = [row for row in rows if row.part == "choice"] or reported
    alone = {row.family: row for row in reported if row.family in (SMALL, LARGE)}
    large = next(row for row in choosing if row.family == LARGE)
    chosen = [
        best_of([row for row in choosing if row.family == family], SHARE * large.accuracy.value)
        for family in dict.fromkeys(row.family for row in choosing if row.family not in alone)
    ]
    settings = {_setting(row): row for row in reported}
    return [alone[SMALL], alone[LARGE], *(settings[_setting(row)] for row in chosen)]


def best_of(curve: Sequence[LadderRow], enough: float) -> LadderRow:
    """The cheapest row of a curve that is right often enough, or its most accurate one where none is."""
    kept = [row for row in curve if row.accuracy.value >= enough]
    return min(kept, key=lambda row: row.cost.value) if kept else max(curve, key=lambda row: row.accuracy.value)


def _setting(row: LadderRow) -> str:
    """What two rows of a run share that differ in their questions alone."""
    return row.model_copy(update={"part": "report"}).key


def setting_name(family: str, policy: dict[str, object]) -> str:
    """A setting in a few words: its curve, and the numbers of its trigger."""
    triggers = policy.get("triggers", [policy])
    assert isinstance(triggers, list | tuple)
    values = [f"{key} {each[key]:g}" for each in triggers for key in ("above", "below", "rate") if key in each]
    return f"{family} ({', '.join(values)})" if values else family


def _cells(row: LadderRow) -> list[str]:
    right = f"{100 * row.accuracy.value:.1f} % ({100 * row.accuracy.low:.1f} to {100 * row.accuracy.high:.1f})"
    shares = [_percent(row.cost), _percent(row.seconds), f"{100 * row.handed_up:.1f} %"]
    return [setting_name(row.family, row.policy), right, *shares, f"{row.catch_ups:.2f}"]


def _percent(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} %"
