"""Rows of a ladder's run as Markdown: both models alone, and the best setting of each curve; what the README quotes."""

from collections.abc import Sequence

from sigma0.bench.ladders import LARGE, SMALL
from sigma0.bench.ledger import AnyRow, Figure, LadderRow

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

    A curve that reaches it nowhere shows its most accurate setting.

    Args:
        rows: Of one run.
    """
    lines = ["| setting | right, 95 % interval | cost | time | tokens of the larger | catch-ups an answer |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    return "\n".join([*lines, *map(_line, shown(rows))])


def shown(rows: Sequence[LadderRow]) -> list[LadderRow]:
    """The rows that `ladder_table` tells."""
    alone = {row.family: row for row in rows if row.family in (SMALL, LARGE)}
    enough = SHARE * alone[LARGE].accuracy.value
    found = [alone[SMALL], alone[LARGE]]
    for family in dict.fromkeys(row.family for row in rows if row.family not in alone):
        curve = [row for row in rows if row.family == family]
        kept = [row for row in curve if row.accuracy.value >= enough]
        found.append(
            min(kept, key=lambda row: row.cost.value) if kept else max(curve, key=lambda row: row.accuracy.value)
        )
    return found


def setting_name(family: str, policy: dict[str, object]) -> str:
    """A setting in a few words: its curve, and the numbers of its trigger."""
    triggers = policy.get("triggers", [policy])
    assert isinstance(triggers, list | tuple)
    values = [f"{key} {each[key]:g}" for each in triggers for key in ("above", "below", "rate") if key in each]
    return f"{family} ({', '.join(values)})" if values else family


def _line(row: LadderRow) -> str:
    right = f"{100 * row.accuracy.value:.1f} % ({100 * row.accuracy.low:.1f} to {100 * row.accuracy.high:.1f})"
    shares = " | ".join(map(_percent, (row.cost, row.seconds)))
    told = setting_name(row.family, row.policy)
    return f"| {told} | {right} | {shares} | {100 * row.handed_up:.1f} % | {row.catch_ups:.2f} |"


def _percent(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} %"
