"""Latency against rate under each routing, as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from sigma0.bench.core.ledger import SimulationRow
from sigma0.bench.core.output import drawing
from sigma0.bench.simulation.routing import ROUTINGS
from sigma0.bench.simulation.table import over_runs
from sigma0.bench.simulation.traffic import LONG, SHORT

# Colour-blind safe (Okabe and Ito).
COLOURS = dict(
    zip(ROUTINGS, ("#999999", "#56B4E9", "#0072B2", "#000000", "#CC79A7", "#E69F00", "#009E73", "#D55E00"), strict=True)
)
MARKERS = dict(zip(ROUTINGS, "xvos^PDX", strict=True))


def draw_simulation(rows: Sequence[SimulationRow], paths: Sequence[Path]) -> None:
    """Draws the largest fleet: 95th percentiles in the queue and of both kinds of traffic, and what is refused.

    Bars are 95 % intervals over the runs.

    Args:
        rows: Of one run.
        paths: Files to write, .png or .svg.
    """
    largest = max(row.replicas for row in rows)
    shown = [row for row in rows if row.replicas == largest]
    panels: dict[str, Callable[[SimulationRow], Sequence[float]]] = {
        "queue, 95th percentile, ms": lambda row: [row.queue_ms.p95],
        "answers of short depth, 95th percentile, ms": lambda row: _p95(row, SHORT),
        "answers of full depth, 95th percentile, ms": lambda row: _p95(row, LONG),
        "refused, %": lambda row: [100 * row.refused],
    }
    with drawing(paths, (16, 4.6)) as picture:
        for axis, (title, value) in zip(picture.subplots(1, len(panels)), panels.items(), strict=True):
            for routing in dict.fromkeys(row.routing for row in shown):
                mine = sorted((row for row in shown if row.routing == routing), key=lambda row: row.rate)
                points = [(row.fleet_rate, values) for row in mine if (values := value(row))]
                axis.errorbar(
                    [rate for rate, _ in points],
                    [over_runs(values).value for _, values in points],
                    yerr=[_half(values) for _, values in points],
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
        first = shown[0]
        picture.suptitle(
            f"SIMULATION, not measured: {largest:,} replicas of {first.model} in groups of {first.group}, "
            f"{first.requests:,} requests in {first.runs} run(s) a point, inputs {first.inputs_sha256[:12]}"
        )
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _p95(row: SimulationRow, kind: str) -> list[float]:
    return [tail.p95 for tail in row.by_kind_by_run_ms.get(kind, ())]


def _half(values: Sequence[float]) -> float:
    found = over_runs(values)
    return found.interval[1] - found.value
