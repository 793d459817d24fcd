"""Rows of the simulation in a table, for the terminal and for Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sigma0.bench.ledger import AnyRow, SimulationRow, Tail

HEADINGS = (
    "replicas",
    "requests/s",
    "routing",
    "queue, ms",
    "first token, ms",
    "answer, ms",
    "short, ms",
    "long, ms",
    "busy",
    "slots",
    "prefix found",
)
# Slots in use, of all, from which on the queue only grows.
FULL = 0.95


def cells(row: SimulationRow) -> tuple[str, ...]:
    """One row as text; times are the median, the 95th and the 99th percentile."""
    kinds = (row.by_kind_ms.get(kind) for kind in ("short", "long"))
    return (
        f"{row.replicas:,}",
        f"{row.fleet_rate:,.4g}" if row.fleet_rate < 1000 else f"{row.fleet_rate:,.0f}",
        row.routing,
        times(row.queue_ms),
        times(row.first_token_ms),
        times(row.latency_ms),
        *("-" if each is None else times(each) for each in kinds),
        f"{row.busy:.0%}",
        f"{row.slots:.0%}{' (full)' if row.slots >= FULL else ''}",
        f"{row.cached:.0%}",
    )


def times(tail: Tail) -> str:
    """Three percentiles."""
    return f"{tail.p50:,.0f} / {tail.p95:,.0f} / {tail.p99:,.0f}"


def latest_simulation(rows: Sequence[AnyRow]) -> list[SimulationRow]:
    """The rows of the last simulation, all of one run on one file of inputs."""
    found = sorted((row for row in rows if isinstance(row, SimulationRow)), key=lambda row: row.time)
    return [row for row in found if (row.run, row.inputs_sha256) == (found[-1].run, found[-1].inputs_sha256)]


def about(row: SimulationRow) -> str:
    """What the rows of a run are, in some sentences."""
    traffic = ", ".join(f"{name} {value:g}" for name, value in row.traffic.items())
    return (
        f"SIMULATED, not measured: replicas of {row.model} with the pass times and exit depths of `passes` ({row.n} "
        f"prompts, {row.dtype}, {row.device}, {row.threads} thread(s), inputs {row.inputs_sha256[:12]}); assumed "
        f"traffic: {traffic}; {row.requests:,} requests a row, seed {row.seed}, groups of {row.group} replicas with a "
        "router each. Times are p50 / p95 / p99; where the slots are full the queue grows as long as one looks."
    )


def markdown(rows: Sequence[SimulationRow]) -> str:
    """The table for a page."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---:|---:|---|" + "---:|" * (len(HEADINGS) - 3)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)])


def whole(rows: Sequence[SimulationRow]) -> str:
    """Every row with what it holds for, as a Markdown page."""
    return f"# A simulation of fleets\n\n{about(rows[0])}\n\n{markdown(rows)}\n"


def print_simulation(rows: Sequence[SimulationRow]) -> None:
    """The rows in a terminal."""
    found = Table(title="SIMULATED, not measured; p50 / p95 / p99", title_justify="left")
    for name in HEADINGS:
        found.add_column(name, justify="left" if name == "routing" else "right", no_wrap=name == "routing")
    for row in rows:
        found.add_row(*cells(row))
    Console(width=max(Console().width, 210)).print(found)
