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
_CALM, _BUSY, _NEAR, _OVER = range(4)


def fleet_sentences(results: Results) -> list[str]:
    """What the server's text says of fleets."""
    found, apart = _fleets(results), _apart(results)
    least, fleet = (found[_LARGE, _BUSY, name] for name in ("least-loaded", "fleet"))
    gains = [_gain(apart[_SMALL, place, "fleet-depth-aware"][1])[0] for place in (_BUSY, _NEAR)]
    return [
        f"on up to {c(fleet.replicas, ',')} replicas, in groups of {c(fleet.group)}, at {c(fleet.fleet_rate, ',.0f')} "
        "requests a second",
        f"percentile of {c(fleet.latency_ms.p95, ',.0f')} ms where the least loaded replica gives "
        f"{c(least.latency_ms.p95, ',.0f')}.",
        f"gain in groups of {c(_SMALL)} only ({gains[0]} and {gains[1]} % at two rates)",
    ]


def simulation_sentences(results: Results) -> list[str]:
    """What the simulation's own text says."""
    found, apart = _fleets(results), _apart(results)
    random, least, affine, fleet = (
        found[_LARGE, _BUSY, name] for name in ("random", "least-loaded", "session-affine", "fleet")
    )
    later, last = (found[_LARGE, place, "fleet"] for place in (_NEAR, _OVER))
    settled = [apart[_LARGE, place, "fleet-depth-aware"] for place in (_CALM, _BUSY, _NEAR)]
    beside = [apart[_LARGE, place, "depth-aware"] for place in (_CALM, _BUSY)]
    small = [apart[_SMALL, place, "fleet-depth-aware"] for place in (_BUSY, _NEAR)]
    marked = [re.sub(r"\d+\.\d+", lambda match: c(match[0]), each[0]) for each in settled]
    short = ", ".join(c(each[1].split()[0]) for each in settled)
    losses, gains = [_loss(each[0]) for each in (*beside, *small)], [_gain(each[1]) for each in (*beside, *small)]
    rates = [c(cells(found[_SMALL, place, "fleet"])[1]) for place in (_BUSY, _NEAR)]
    times = simulation_inputs(results).pass_times
    paces = [min(times.paces), max(times.paces)]
    return [
        f"took {c(paces[0], '.2f')} to {c(paces[1], '.2f')} times the mean",
        f"At {c(fleet.fleet_rate, ',.0f')} requests a second on {c(fleet.replicas, ',')} replicas the 95th percentile of an "
        f"answer is {c(random.latency_ms.p95, ',.0f')} ms where any replica is drawn, {c(least.latency_ms.p95, ',.0f')} "
        f"where the least loaded one is taken, {c(affine.latency_ms.p95, ',.0f')} where a chat has a replica drawn for "
        f"it, and {c(fleet.latency_ms.p95, ',.0f')} under `fleet`, which finds {p(fleet.cached, 0)} % of the prompts'",
        f"At {c(later.fleet_rate, ',.0f')} `fleet` still answers within {c(later.latency_ms.p95, ',.0f')} ms",
        f"has a p95 of {marked[0]}, {marked[1]} and {marked[2]} times `fleet`'s",
        f"could be told from noise ({short}).",
        f"short answers gain {gains[0][0]} to {gains[1][0]} % at the two lower rates, and all together lose "
        f"{losses[0][0]} % ({losses[0][1]} to {losses[0][2]}) and {losses[1][0]} % ({losses[1][1]} to {losses[1][2]}).",
        f"In a group of {c(_SMALL)}, which is halved, short answers gain {gains[2][0]} % ({gains[2][1]} to {gains[2][2]}) and "
        f"{gains[3][0]} % ({gains[3][1]} to {gains[3][2]})",
        f"at {rates[0]} and {rates[1]} requests a second, and all together lose {losses[2][0]} % "
        f"({losses[2][1]} to {losses[2][2]}) and {losses[3][0]} % ({losses[3][1]} to {losses[3][2]}).",
        f"({c(fleet.by_kind_ms[SHORT].p50, '.0f')} against {c(fleet.by_kind_ms[LONG].p50, '.0f')} ms under `fleet` at "
        f"{c(fleet.fleet_rate, ',.0f')})",
        f"From {c(later.fleet_rate, ',.0f')} to {c(last.fleet_rate, ',.0f')} requests a second the median answer of `fleet` "
        f"goes from {c(later.latency_ms.p50, ',.0f')} ms to {c(last.latency_ms.p50, ',.0f')}",
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


def _gain(cell: str) -> list[str]:
    """A ratio with its interval as a gain in per cent: least and greatest change places."""
    value, low, high = map(float, re.findall(r"\d+\.\d+", cell))
    return [c(100 * (1 - each), ".0f") for each in (value, high, low)]


def _loss(cell: str) -> list[str]:
    value, low, high = map(float, re.findall(r"\d+\.\d+", cell))
    return [c(100 * (each - 1), ".0f") for each in (value, low, high)]
