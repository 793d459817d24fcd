"""Accuracy against cost as a picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.core.ledger import LadderRow
from sigma0.bench.core.output import drawing
from sigma0.bench.ladder.measure import LARGE, SMALL


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
