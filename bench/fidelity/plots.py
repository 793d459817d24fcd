"""Pictures of the trade-off: fidelity against each saving, and the depth of every token of some texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from sigma0.bench.core.output import drawing
from sigma0.bench.core.rows import DepthRow, FidelityRow
from sigma0.commands.console import depth_style

SAVINGS = {
    "depth_saved": "depth saved, % (notional)",
    "passes_saved": "passes saved, % (latency)",
    "rows_saved": "rows saved, % (arithmetic)",
}
FIDELITIES = {
    "agreement_on_answers": "new tokens with full depth's argmax, %",
    "agreement": "all tokens with full depth's argmax, %",
}
# Colour-blind safe (Okabe and Ito).
COLOURS = {
    "qexit": "#0072B2",
    "margin": "#D55E00",
    "converge": "#009E73",
    "accel": "#CC79A7",
    "accel-steps": "#E69F00",
    "fixed": "#000000",
    "random": "#999999",
    "oracle": "#56B4E9",
    "settled": "#56B4E9",
}
MARKERS = {"fixed": "s", "random": "x", "oracle": "*", "settled": "P"}
_COLUMNS = 14
# Sum of red, green and blue below which white text is easier to read.
_DARK = 1.5


def draw_trade_off(rows: Sequence[FidelityRow], paths: Sequence[Path]) -> None:
    """Draws two measures of fidelity of one run, one above the other, against the three savings."""
    with drawing(paths, (12, 8)) as picture:
        axes = picture.subplots(2, 3, sharey="row", sharex="col")
        for line, (fidelity, title) in zip(axes, FIDELITIES.items(), strict=True):
            line[0].set_ylabel(title)
            for axis, saving in zip(line, SAVINGS, strict=True):
                for mode in COLOURS:
                    for after in ("finish", "drop"):
                        chosen = [row for row in rows if row.mode == mode and row.after_exit == after]
                        _curve(axis, chosen, saving, fidelity)
                axis.grid(alpha=0.3)
        for axis, text in zip(axes[-1], SAVINGS.values(), strict=True):
            axis.set_xlabel(text)
            axis.set_xlim(left=-3)
        first = rows[0]
        picture.suptitle(f"{first.model}: {first.n} prompts, {first.total_loops} loops, bars are 95 % intervals")
        picture.legend(handles=_legend(rows), loc="outside lower center", ncols=6, frameon=False)


def draw_depths(row: DepthRow, paths: Sequence[Path]) -> None:
    """Draws the new tokens of the sample texts, each box in the colour of its depth."""
    with drawing(paths, (11, 0.62 * len(row.samples) + 1.2), font=9) as picture:
        axis = picture.subplots()
        for line, sample in enumerate(row.samples):
            for column, (text, depth) in enumerate(sample.tokens[:_COLUMNS]):
                colour = depth_style(depth, row.total_loops)
                axis.add_patch(Rectangle((column, -line - 0.9), 0.96, 0.8, color=colour))
                ink = "white" if sum(to_rgb(colour)) < _DARK else "black"
                shown = text.strip() or "\u2423"
                size = 9 if len(shown) <= 8 else 7
                axis.text(column + 0.48, -line - 0.5, shown, ha="center", va="center", color=ink, fontsize=size)
        axis.set_xlim(-0.1, max(min(len(sample.tokens), _COLUMNS) for sample in row.samples))
        axis.set_ylim(-len(row.samples) - 0.1, 0.1)
        axis.set_axis_off()
        loops = range(1, row.total_loops + 1)
        handles = [Rectangle((0, 0), 1, 1, color=depth_style(loop, row.total_loops), label=str(loop)) for loop in loops]
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
        picture.suptitle(
            f"{row.model}, {row.mode} ({settings}): the loop each token of {len(row.samples)} answers took"
        )
        picture.legend(handles=handles, loc="outside lower center", ncols=row.total_loops, frameon=False, title="loop")


def _curve(axis: Axes, rows: Sequence[FidelityRow], saving: str, fidelity: str) -> None:
    points = [(getattr(row, saving), getattr(row, fidelity)) for row in rows]
    known = sorted(((x, y) for x, y in points if x is not None), key=lambda point: point[0].value)
    if not known:
        return
    mode = rows[0].mode
    axis.errorbar(
        [100 * x.value for x, _ in known],
        [100 * y.value for _, y in known],
        yerr=[[100 * (y.value - y.low) for _, y in known], [100 * (y.high - y.value) for _, y in known]],
        markersize=11 if mode == "oracle" else 5,
        linewidth=1.3,
        elinewidth=0.7,
        alpha=0.9,
        **_style(mode, rows[0].after_exit),
    )


def _style(mode: str, after: str) -> dict[str, Any]:
    line = ":" if mode == "random" else "--" if after == "drop" else "-"
    return {"color": COLOURS[mode], "marker": MARKERS.get(mode, "o"), "linestyle": line}


def _legend(rows: Sequence[FidelityRow]) -> list[Line2D]:
    shown = {(row.mode, row.after_exit) for row in rows if row.mode in COLOURS}
    return [
        Line2D([], [], label=f"{mode}, {after}" if (mode, "drop") in shown else mode, **_style(mode, after))
        for mode in COLOURS
        for after in ("finish", "drop")
        if (mode, after) in shown
    ]
