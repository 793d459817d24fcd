"""`python -m sigma0.bench simulate`: SIMULATED fleets of replicas, out of measured pass times and measured depths."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sigma0.bench.core.conditions import git_commit
from sigma0.bench.core.ledger import OWN, Conditions, SimulationRow, Tail, append_row, read_rows, repair
from sigma0.bench.core.options import AsJsonLines, LedgerFile
from sigma0.bench.core.output import tell_rows
from sigma0.bench.core.rows_systems import SIMULATION_SIZES, simulation_key
from sigma0.bench.simulation.inputs import Inputs, read_inputs
from sigma0.bench.simulation.measure_command import INPUTS
from sigma0.bench.simulation.routing import ROUTINGS
from sigma0.bench.simulation.study import Fleets, Seen, Setting, counted_from
from sigma0.bench.simulation.study import simulate as simulate_one
from sigma0.bench.simulation.table import print_simulation
from sigma0.bench.simulation.traffic import Traffic
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.errors import needs_extra

# Of the most that one replica answers whose chats stay, where no rates are given: routings that part chats from their
# prefixes are full at the second already, none is before the last.
LOADS = (0.25, 0.45, 0.7, 1.0)
COMPARED = "random,least-loaded,session-affine,fleet,depth-aware,fleet-depth-aware"
_LIBRARIES = ("sigma0-lm", "numpy")


def simulate(
    inputs: Annotated[Path, typer.Option(help="What `python -m sigma0.bench passes` wrote.")] = INPUTS,
    replicas: Annotated[str, typer.Option(help="Replicas of the fleets, separated by commas.")] = "16,10240",
    rates: Annotated[
        str,
        typer.Option(
            help="Requests a second for each replica, separated by commas; by default 25 to 100 % of the most that one "
            "answers where it finds its prefixes."
        ),
    ] = "",
    routings: Annotated[str, typer.Option(help=f"Some of {', '.join(ROUTINGS)}; separated by commas.")] = COMPARED,
    short_share: Annotated[float, typer.Option(help="Share of chats whose tokens may stop early.")] = 0.5,
    turns: Annotated[float, typer.Option(help="Mean turns of a chat.")] = 3.0,
    think: Annotated[float, typer.Option(help="Mean seconds from an answer to the next turn.")] = 5.0,
    requests: Annotated[int, typer.Option(help="Requests to measure for each setting, over all runs.")] = 3000,
    runs: Annotated[int, typer.Option(help="Independent runs, from which the intervals are.")] = 5,
    warm: Annotated[int, typer.Option(help="Requests for each replica before the measured ones, in each run.")] = 100,
    waiting: Annotated[int, typer.Option(help="Requests that wait at a replica at most; more are refused.")] = 64,
    group: Annotated[
        int, typer.Option(help="Replicas that share a router, at most; a run simulates one such group of the fleet.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Latency against rate, as .svg or .png.")] = None,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """SIMULATE fleets: queueing, tail latency and use under each routing; rows in the ledger are not made again."""
    with one_line_errors(), needs_extra("bench"):
        if picture is not None and picture.suffix not in (".svg", ".png"):
            raise ValueError(f"--picture {str(picture)!r}: give a name that ends in .svg or .png")
        found, digest = read_inputs(inputs)
        traffic = Traffic(short_share=short_share, turns=turns, think=think)
        fleets = Fleets(found)
        asked = rates_of(rates) or [round(load * fleets.most(traffic), 2) for load in LOADS]
        settings = [
            Setting(
                routing=routing,
                replicas=count,
                rate=rate,
                traffic=traffic,
                requests=requests,
                group=group,
                seed=seed,
                runs=runs,
                warm=warm,
                waiting=waiting,
            )
            for count in counts_of(replicas)
            for rate in asked
            for routing in named(routings)
        ]
        repair(out)
        rows = _rows(fleets, digest, settings, out, as_json)
        if picture is not None:
            from sigma0.bench.simulation.picture import draw_simulation

            draw_simulation(rows, [picture])
    tell_rows(rows, as_json, lambda: print_simulation(rows), f"SIMULATED; {len(rows)} rows in {out}")


def _rows(fleets: Fleets, digest: str, settings: Sequence[Setting], out: Path, hidden: bool) -> list[SimulationRow]:
    """A row for each setting, out of the ledger where it has it."""
    conditions = simulated_conditions(fleets.inputs.conditions)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    known = {row.key: row for row in read_rows(out) if row.run == conditions.run and isinstance(row, SimulationRow)}
    rows, before = [], 0
    with progress_bar("simulated requests", sum(setting.requests for setting in settings), hidden) as advance:
        for setting in settings:
            row = known.get(key_of(setting, digest))
            if row is None:
                seen = simulate_one(fleets, setting, counted_from(before, advance))
                row = to_row(fleets.inputs, conditions, began, digest, setting, seen)
                append_row(out, row)
            rows.append(row)
            before += setting.requests
            advance(before)
    return rows


def simulated_conditions(measured: Conditions) -> Conditions:
    """Those of the inputs, with the code and the libraries that simulate."""
    versions = {"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}}
    return measured.model_copy(update={"commit": git_commit(), "versions": versions})


def key_of(setting: Setting, digest: str) -> str:
    """The key of a setting's row."""
    return simulation_key(digest, setting.routing, sizes_of(setting), setting.rate, asdict(setting.traffic))


def sizes_of(setting: Setting) -> dict[str, int]:
    """How much is simulated, by the names of a row."""
    named = {**vars(setting), "group": setting.members}
    return {name: named[name] for name in SIMULATION_SIZES}


def to_row(
    inputs: Inputs, conditions: Conditions, began: str, digest: str, setting: Setting, seen: Seen
) -> SimulationRow:
    """The row of a setting."""
    worst = max(inputs.checks, key=lambda check: check.off, default=None)
    told: dict[Literal["measured", "simulated"], tuple[float, float, float]]
    told = {} if worst is None else {"measured": worst.measured, "simulated": worst.simulated}
    found: dict[str, Any] = {each.name: getattr(seen, each.name) for each in fields(seen)}
    found.update(conditions.model_dump())
    found.update(sizes_of(setting))
    return SimulationRow(
        **found,
        time=began,
        inputs_sha256=digest,
        routing=setting.routing,
        rate=setting.rate,
        traffic=asdict(setting.traffic),
        check_ms={name: Tail(p50=p50, p95=p95, p99=p99) for name, (p50, p95, p99) in told.items()},
    )


def named(text: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(text.split(",")))


def rates_of(text: str) -> list[float]:
    """Rates separated by commas; none where there is no text.

    Raises:
        ValueError: For what is no number above 0.
    """
    try:
        found = [float(each) for each in text.split(",") if each]
    except ValueError as error:
        raise ValueError(f"--rates {text!r} is no list of numbers such as 5,7.5") from error
    if not all(0 < each < float("inf") for each in found):
        raise ValueError(f"--rates {text!r}: a rate is a number above 0, such as 5")
    return found


def counts_of(text: str) -> list[int]:
    """Numbers of replicas separated by commas.

    Raises:
        ValueError: For what is no whole number.
    """
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--replicas {text!r} is no list of whole numbers such as 16,10000") from error
