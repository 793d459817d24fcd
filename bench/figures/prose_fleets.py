"""The figures of the simulated fleets that stand in sentences, each with the row that it comes from."""

# ruff: noqa: E501  (sentences are easier to find in their text where they are not broken up)

import re
from collections.abc import Sequence

from sigma0.bench.core.ledger import SimulationRow
from sigma0.bench.figures.check import computed as c
from sigma0.bench.figures.forms import percent as p
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import simulation_inputs
from sigma0.bench.simulation.table import apart_cells, cells, latest_simulation
from sigma0.bench.simulation.traffic import LONG, SHORT

# The fleets that sentences speak of, and the rates by which they do, in ascending order.
_LARGE, _SMALL = 10240, 16
_CALM, _BUSY, _NEAR = range(3)


def fleet_sentences(results: Results) -> list[str]:
    """What the server's text says of fleets."""
    found, apart = _fleets(results), _apart(results)[_LARGE, _BUSY, "fleet-depth-aware"]
    least, fleet = (found[_LARGE, _BUSY, name] for name in ("least-loaded", "fleet"))
    return [
        f"on up to {c(fleet.replicas, ',')} replicas, in groups of {c(fleet.group)}, at {c(fleet.fleet_rate, ',.0f')} "
        "requests a second",
        f"percentile of {c(fleet.latency_ms.p95, ',.0f')} ms where the least loaded replica gives "
        f"{c(least.latency_ms.p95, ',.0f')}.",
        f"take {c(100 * (1 - _ratio(apart[1])), '.0f')} % off the 95th percentile of its answers there, and add "
        f"{c(100 * (_ratio(apart[0]) - 1), '.0f')} % to that of all together",
    ]


def simulation_sentences(results: Results) -> list[str]:
    """What the simulation's own text says."""
    found, apart = _fleets(results), _apart(results)
    names = ("random", "least-loaded", "session-affine", "fleet")
    random, least, affine, fleet = (found[_LARGE, _BUSY, name] for name in names)
    later = found[_LARGE, _NEAR, "fleet"]
    medians = [c(found[_LARGE, _BUSY, name].latency_ms.p50, ",.0f") for name in names]

    def ratios(replicas: int, routing: str, place: int) -> str:
        calm, busy = (_marked(apart[replicas, rate, routing][place]) for rate in (_CALM, _BUSY))
        return f"{calm} and {busy}"

    times = simulation_inputs(results).pass_times
    return [
        f"took {c(min(times.paces), '.2f')} to {c(max(times.paces), '.2f')} times the mean",
        f"At {c(fleet.fleet_rate, ',.0f')} requests a second on {c(fleet.replicas, ',')} replicas the 95th percentile of an "
        f"answer is {c(random.latency_ms.p95, ',.0f')} ms where any replica is drawn, {c(least.latency_ms.p95, ',.0f')} "
        f"where the least loaded one is taken, {c(affine.latency_ms.p95, ',.0f')} where a chat has a replica drawn for "
        f"it, and {c(fleet.latency_ms.p95, ',.0f')} under `fleet`, which finds {p(fleet.cached, 0)} % of the prompts'",
        f"The medians are {medians[0]}, {medians[1]}, {medians[2]} and {medians[3]} ms.",
        f"`fleet-depth-aware` has a p95 of {ratios(_LARGE, 'fleet-depth-aware', 0)} times `fleet`'s at the two rates",
        f"that of the short traffic is {ratios(_LARGE, 'fleet-depth-aware', 1)} times as long.",
        f"which finds no prefixes: {ratios(_LARGE, 'depth-aware', 0)}, short {ratios(_LARGE, 'depth-aware', 1)}.",
        f"In a group of {c(_SMALL)}, which is halved, `fleet-depth-aware` takes {ratios(_SMALL, 'fleet-depth-aware', 0)} "
        f"times as long, short {ratios(_SMALL, 'fleet-depth-aware', 1)}.",
        f"({c(fleet.by_kind_ms[SHORT].p50, '.0f')} against {c(fleet.by_kind_ms[LONG].p50, '.0f')} ms under `fleet` at "
        f"{c(fleet.fleet_rate, ',.0f')})",
        f"From {c(fleet.fleet_rate, ',.0f')} to {c(later.fleet_rate, ',.0f')} requests a second the median answer of `fleet` "
        f"goes from {c(fleet.latency_ms.p50, ',.0f')} ms to {c(later.latency_ms.p50, ',.0f')}",
        f"fewer prefixes are found ({p(later.cached, 0)} %)",
    ]


def _fleets(results: Results) -> dict[tuple[int, int, str], SimulationRow]:
    """The rows of the last simulation by replicas, place of their rate, and routing."""
    rows = latest_simulation(results.rows)
    rates = sorted({row.rate for row in rows})
    return {(row.replicas, rates.index(row.rate), row.routing): row for row in rows}


def _apart(results: Results) -> dict[tuple[int, int, str], Sequence[str]]:
    """What keeping depths apart changes, likewise."""
    found = _fleets(results)
    names = {cells(row)[:3]: key for key, row in found.items()}
    return {names[cell[:3]]: cell[4:] for cell in apart_cells(list(found.values()))}


def _ratio(cell: str) -> float:
    """A ratio without its interval."""
    return float(cell.split()[0])


def _marked(cell: str) -> str:
    """A ratio with its interval, all marked as computed."""
    return re.sub(r"\d+\.\d+", lambda match: c(match[0]), cell)
