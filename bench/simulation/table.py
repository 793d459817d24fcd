"""Rows of the simulation in tables, for the terminal and for Markdown, and latency against rate as a picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sigma0.bench.core.conditions import mean_of
from sigma0.bench.core.output import BenchTable, drawing, with_interval
from sigma0.bench.core.rows import AnyRow, SimulationRow, Tail
from sigma0.bench.simulation.cluster import LONG, ROUTINGS, SHORT, TOGETHER
from sigma0.bench.simulation.inputs import Check, tail_of

APART_HEADINGS = ("replicas", "requests/s", "apart", "together", "all, p95", "short, p95", "long, p95")
# Of both tables, the columns that hold names.
LEFT = ("routing", "apart", "together")
APART = (
    "95th percentiles where short and long traffic have replicas of their own, over those of the same routing with all "
    "traffic together: as many replicas in all, asked by the same chats. Means of the ratios of the runs, with their "
    "95 % intervals; under 1 is better apart."
)
# By which the later half of a run is slower, before its queue is said to grow: what is less is no matter in a table.
GROWTH = 1.1
# Share of the slots that are taken, from which on the queue fills.
FULL = 0.95


def times(tail: Tail) -> str:
    """Three percentiles."""
    return f"{tail.p50:,.0f} / {tail.p95:,.0f} / {tail.p99:,.0f}"


def p95(tails: Sequence[Tail]) -> list[float]:
    """The 95th percentile of each run."""
    return [tail.p95 for tail in tails]


def is_unsettled(row: SimulationRow) -> bool:
    """Whether the slots were full or answers took longer in the later half of the runs.

    Its times would be others had one looked longer: until the queues are full, and requests are refused.
    """
    drift = mean_of(row.drift_by_run)
    return (drift.value > GROWTH and drift.interval[0] > 1) or row.slots >= FULL


def _kind(row: SimulationRow, kind: str) -> str:
    return times(row.by_kind_ms[kind]) if kind in row.by_kind_ms else "-"


# A row as text; times are the median, the 95th and the 99th percentile.
COLUMNS: Mapping[str, Callable[[SimulationRow], str]] = {
    "replicas": lambda row: f"{row.replicas:,}",
    "requests/s": lambda row: f"{row.fleet_rate:,.4g}" if row.fleet_rate < 1000 else f"{row.fleet_rate:,.0f}",
    "routing": lambda row: row.routing,
    "refused": lambda row: f"{row.refused:.1%}",
    "queue, ms": lambda row: times(row.queue_ms),
    "first token, ms": lambda row: times(row.first_token_ms),
    "answer, ms": lambda row: times(row.latency_ms) + (" (unsettled)" if is_unsettled(row) else ""),
    "its p95": lambda row: (
        "{:,.0f} to {:,.0f}".format(*mean_of(p95(row.latency_by_run_ms)).interval) if row.runs > 1 else "-"
    ),
    "short, ms": lambda row: _kind(row, "short"),
    "long, ms": lambda row: _kind(row, "long"),
    "busy": lambda row: f"{row.busy:.0%}",
    "slots": lambda row: f"{row.slots:.0%}",
    "prefix found": lambda row: f"{row.cached:.0%}",
}


def cells(row: SimulationRow) -> list[str]:
    """One row as text."""
    return [column(row) for column in COLUMNS.values()]


def apart_cells(rows: Sequence[SimulationRow]) -> list[tuple[str, ...]]:
    """What keeping depths apart changes: 95th percentiles over those of the same routing with all together.

    Ratios are taken run by run, since both were asked by the same chats, with their mean and its 95 % interval.
    """
    known = {(row.replicas, row.rate, row.routing): row for row in rows}
    result = []
    for row in rows:
        other = known.get((row.replicas, row.rate, TOGETHER.get(row.routing, "")))
        if other is None:
            continue
        mine, others = ({"all": item.latency_by_run_ms, **item.by_kind_by_run_ms} for item in (row, other))
        ratios = [_ratio(mine.get(kind, ()), others.get(kind, ())) for kind in ("all", "short", "long")]
        unsettled = " (unsettled)" if is_unsettled(row) or is_unsettled(other) else ""
        result.append((*cells(row)[:3], other.routing + unsettled, *ratios))
    return result


def _ratio(mine: Sequence[Tail], others: Sequence[Tail]) -> str:
    if not mine or not others:
        return "-"
    result = mean_of([one / other for one, other in zip(p95(mine), p95(others), strict=True)])
    return with_interval(result, 2, 1, "") if len(mine) > 1 else f"{result.value:.2f}"


def latest_simulation(rows: Sequence[AnyRow]) -> list[SimulationRow]:
    """The rows of the last simulation: on one file of inputs, with one traffic and size; by fleet and rate."""
    result = sorted((row for row in rows if isinstance(row, SimulationRow)), key=lambda row: row.time)
    latest = [row for row in result if _study(row) == _study(result[-1])]
    return sorted(latest, key=lambda row: (row.replicas, row.rate))


def _study(row: SimulationRow) -> tuple[object, ...]:
    sizes = (row.requests, row.runs, row.warm, row.waiting, row.seed)
    return row.run, row.inputs_sha256, sizes, tuple(sorted(row.traffic.items()))


def about(row: SimulationRow, groups: Sequence[int]) -> str:
    """What the rows of a run are, in some sentences."""
    traffic = ", ".join(f"{name} {value:g}" for name, value in row.traffic.items())
    real, simulated = row.check_ms.get("measured"), row.check_ms.get("simulated")
    checked = (
        f"Off by {_off(real, simulated)} % (p50 / p95 / p99) on one replica, at that of the loads it was checked at, "
        f"none of them fitted, at which it is furthest off: the real engine took {times(real)} ms and the simulation "
        f"of the same arrivals {times(simulated)} ms. "
        if real and simulated
        else "It was not checked against the real engine. "
    )
    return (
        f"SIMULATED, not measured. {checked}Replicas of {row.named} with the pass times and exit depths of `passes` "
        f"({row.n} prompts, {row.dtype}, {row.device}, {row.threads} thread(s), inputs {row.inputs_sha256[:12]}); "
        f"assumed traffic: {traffic}. {row.requests:,} measured requests a row over {row.runs} independent run(s) "
        f"(seed {row.seed}, {row.warm} requests a replica before them), each of one group of "
        f"{' or '.join(map(str, groups))} replicas with a router of its own: a larger fleet is many such groups and "
        f"was not simulated whole. A replica lets {row.waiting} requests wait and refuses more. Times are "
        "p50 / p95 / p99 of answered requests, means over the runs; intervals are 95 % by Student's t over the runs. "
        "Where it says unsettled, the slots were full or the queue still grew: the times tell how long one looked."
    )


def _off(real: Tail, simulated: Tail) -> str:
    """By how many per cent the simulated percentiles are above the real ones."""
    pairs = ((simulated.p50, real.p50), (simulated.p95, real.p95), (simulated.p99, real.p99))
    return " / ".join(f"{100 * (mine / theirs - 1):+.0f}" for mine, theirs in pairs)


CHECK_COLUMNS: Mapping[str, Callable[[Check], str]] = {
    "requests/s": lambda check: f"{check.rate:.1f}",
    "requests": lambda check: f"{check.requests:,}",
    "engine, ms": lambda check: times(tail_of(check.measured)),
    "simulation, ms": lambda check: times(tail_of(check.simulated)),
    "off by, %": lambda check: _off(tail_of(check.measured), tail_of(check.simulated)),
    "pace": lambda check: f"{fmean(check.paces):.2f} ({min(check.paces):.2f} to {max(check.paces):.2f})",
}


def checks_table(checks: Sequence[Check]) -> BenchTable:
    """The real engine beside the simulation of the same arrivals, at each load."""
    return BenchTable.of(CHECK_COLUMNS, checks, left=())


def tables(rows: Sequence[SimulationRow]) -> list[BenchTable]:
    """All rows, and what keeping depths apart changes where that was simulated."""
    apart = BenchTable(APART_HEADINGS, apart_cells(rows), "SIMULATED: depths apart over depths together", LEFT)
    title = "SIMULATED, not measured; p50 / p95 / p99"
    return [BenchTable.of(COLUMNS, rows, title, LEFT), *([apart] if apart.rows else [])]


def whole(rows: Sequence[SimulationRow]) -> str:
    """Every row with what it holds for, as a Markdown page."""
    every, *apart = (table.markdown() for table in tables(rows))
    result = f"# A simulation of fleets\n\n{about(rows[0], sorted({row.group for row in rows}))}\n\n{every}\n"
    return result + "".join(f"\n## Depths apart\n\n{APART}\n\n{item}\n" for item in apart)


def print_simulation(rows: Sequence[SimulationRow]) -> None:
    """The rows in a terminal."""
    for table in tables(rows):
        table.show(no_wrap=table.headings)


# Colour-blind safe (Okabe and Ito).
COLOURS = dict(
    zip(ROUTINGS, ("#999999", "#56B4E9", "#0072B2", "#000000", "#CC79A7", "#E69F00", "#009E73", "#D55E00"), strict=True)
)
MARKERS = dict(zip(ROUTINGS, "xvos^PDX", strict=True))


def draw_simulation(rows: Sequence[SimulationRow], paths: Sequence[Path]) -> None:
    """Draws the largest fleet of a run: 95th percentiles with their intervals over the runs, and what is refused."""
    from matplotlib.ticker import MaxNLocator

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
