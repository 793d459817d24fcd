"""Rows of a ladder's run: both models alone and one setting of each curve as Markdown, all curves as a picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, drawing, percent, with_interval
from sigma0.bench.core.rows import AnyRow, LadderRow
from sigma0.bench.ladder.measure import LARGE, SMALL

SHARE = 0.95


def ladder_runs(rows: Sequence[AnyRow]) -> dict[str, list[LadderRow]]:
    """The rows of each run, by the time that it began."""
    return runs_of(rows, LadderRow, lambda row: row.time)


def ladder_table(rows: Sequence[LadderRow]) -> str:
    """Both models alone, then of each curve the cheapest setting with 95 % of the larger model's accuracy.

    A curve that reaches it nowhere shows its most accurate setting. A sentence before the table says on which questions
    the settings were chosen.
    """
    choosing = next((row for row in rows if row.part == "choice"), None)
    output = "these very questions" if choosing is None else f"{choosing.n} questions of their own ({choosing.prompts})"
    return f"Settings are chosen on {output}.\n\n{BenchTable.of(COLUMNS, shown(rows)).markdown()}"


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
    values = [f"{key} {item[key]:g}" for item in triggers for key in ("above", "below", "rate") if key in item]
    return f"{family} ({', '.join(values)})" if values else family


COLUMNS: Mapping[str, Callable[[LadderRow], str]] = {
    "setting": lambda row: setting_name(row.family, row.policy),
    "right, 95 % interval": lambda row: with_interval(row.accuracy),
    "cost": lambda row: percent(row.cost),
    "time": lambda row: percent(row.seconds),
    "tokens of the larger": lambda row: f"{100 * row.handed_up:.1f} %",
    "catch-ups an answer": lambda row: f"{row.catch_ups:.2f}",
}


def draw_ladder(rows: Sequence[LadderRow], file: Path, title: str) -> None:
    """One line for each curve, the two models alone as stars."""
    with drawing([file], (9, 5)) as figure:
        axes = figure.subplots()
        alone = [row for row in rows if row.family in (SMALL, LARGE)]
        curves = dict.fromkeys(row.family for row in rows if row not in alone)
        for place, name in enumerate(curves):
            curve = sorted((row for row in rows if row.family == name), key=lambda row: row.cost.value)
            costs, rights = [100 * row.cost.value for row in curve], [100 * row.accuracy.value for row in curve]
            axes.plot(costs, rights, marker="os^Dv<>PX*"[place], markersize=4, color=f"C{place}", label=name)
        for row in alone:
            axes.plot(100 * row.cost.value, 100 * row.accuracy.value, "*", markersize=14, color="black")
            axes.annotate(row.family, (100 * row.cost.value, 100 * row.accuracy.value), (6, -12),
                          textcoords="offset points")  # fmt: skip
        above = next(row for row in alone if row.family == LARGE)
        axes.axhline(95 * above.accuracy.value, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlabel="cost, % of the larger model alone (passes x block bytes, prompts included)", ylabel="right, %",
                 title=title)  # fmt: skip
        figure.legend(loc="outside right upper", fontsize="small")
