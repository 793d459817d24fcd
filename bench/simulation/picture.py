"""Latency against rate under each routing, as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from sigma0.bench.core.conditions import mean_of
from sigma0.bench.core.output import drawing
from sigma0.bench.core.rows import SimulationRow
from sigma0.bench.simulation.cluster import ROUTINGS
from sigma0.bench.simulation.table import p95
from sigma0.bench.simulation.traffic import LONG, SHORT

# Colour-blind safe (Okabe and Ito).
COLOURS = dict(
    zip(ROUTINGS, ("#999999", "#56B4E9", "#0072B2", "#000000", "#CC79A7", "#E69F00", "#009E73", "#D55E00"), strict=True)
)
MARKERS = dict(zip(ROUTINGS, "xvos^PDX", strict=True))


def draw_simulation(rows: Sequence[SimulationRow], paths: Sequence[Path]) -> None:
    """Draws the largest fleet of a run: 95th percentiles with their intervals over the runs, and what is refused."""
    largest = max(row.replicas for row in rows)
    shown = sorted((row for row in rows if row.replicas == largest), key=lambda row: row.rate)
    panels: dict[str, Callable[[SimulationRow], list[float]]] = {
        "queue, 95th percentile, ms": lambda row: [row.queue_ms.p95],
        "answers of short depth, 95th percentile, ms": lambda row: p95(row.by_kind_by_run_ms.get(SHORT, ())),
        "answers of full depth, 95th percentile, ms": lambda row: p95(row.by_kind_by_run_ms.get(LONG, ())),
        "refused, %": lambda row: [100 * row.refused],
    }
    with drawing(paths, (16, 4.6)) as picture:
        for axis, (title, value) in zip(picture.subplots(1, len(panels)), panels.items(), strict=True):
            for routing in dict.fromkeys(row.routing for row in rows if row.replicas == largest):
                mine = [row for row in shown if row.routing == routing and value(row)]
                means = [mean_of(value(row)) for row in mine]
                axis.errorbar(
                    [row.fleet_rate for row in mine],
                    [item.value for item in means],
                    yerr=[item.interval[1] - item.value for item in means],
                    color=COLOURS[routing],
                    marker=MARKERS[routing],
                    markersize=5,
                    capsize=2,
                    label=routing,
                )
            axis.set(xlabel="requests a second", ylabel=title, yscale="symlog" if title.endswith("ms") else "linear")
            axis.set_ylim(bottom=0)
            axis.xaxis.set_major_locator(MaxNLocator(4))
            axis.grid(alpha=0.3)
        first = rows[0]
        picture.suptitle(
            f"SIMULATION, not measured: {largest:,} replicas of {first.model} in groups of {shown[0].group}, "
            f"{first.requests:,} requests in {first.runs} run(s) a point, inputs {first.inputs_sha256[:12]}"
        )
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
