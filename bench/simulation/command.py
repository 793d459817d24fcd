"""`python -m sigma0.bench simulate`: SIMULATED fleets of replicas, out of measured pass times and measured depths."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.conditions import git_commit
from sigma0.bench.ledger import LEDGER, Conditions, SimulationRow, append_row, read_rows, repair
from sigma0.bench.output import tell_rows
from sigma0.bench.rows_systems import simulation_key
from sigma0.bench.simulation.inputs import read_inputs
from sigma0.bench.simulation.measure_command import INPUTS
from sigma0.bench.simulation.routing import ROUTINGS
from sigma0.bench.simulation.study import Fleets, Seen, Setting, counted_from
from sigma0.bench.simulation.study import simulate as simulate_one
from sigma0.bench.simulation.table import print_simulation
from sigma0.bench.simulation.traffic import Traffic
from sigma0.extras import needs_extra
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers

# Of the most that one replica answers, where no rates are given.
LOADS = (0.3, 0.6, 0.8, 0.95, 1.1)
_LIBRARIES = ("sigma0-lm", "numpy")


def simulate(
    inputs: Annotated[Path, typer.Option(help="What `python -m sigma0.bench passes` wrote.")] = INPUTS,
    replicas: Annotated[str, typer.Option(help="Replicas of the fleets, parted by commas.")] = "16,10000",
    rates: Annotated[
        str,
        typer.Option(
            help="Requests a second for each replica, parted by commas; by default 30 to 110 % of the most that one "
            "answers where no prefix is found."
        ),
    ] = "",
    routings: Annotated[str, typer.Option(help="Some of these, parted by commas.")] = ",".join(ROUTINGS),
    short_share: Annotated[float, typer.Option(help="Share of chats whose tokens may stop early.")] = 0.5,
    turns: Annotated[float, typer.Option(help="Mean turns of a chat.")] = 3.0,
    think: Annotated[float, typer.Option(help="Mean seconds from an answer to the next turn.")] = 5.0,
    requests: Annotated[int, typer.Option(help="Requests to simulate for each setting.")] = 12000,
    group: Annotated[int, typer.Option(help="Replicas that share a router, at most.")] = 16,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Latency against rate, as .svg or .png.")] = None,
    out: Annotated[Path, typer.Option(help="Ledger that the rows are appended to.")] = LEDGER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")] = False,
) -> None:
    """SIMULATE fleets: queueing, tail latency and use under each routing; rows in the ledger are not made again."""
    quiet_transformers()
    with one_line_errors(), needs_extra("bench"):
        found, digest = read_inputs(inputs)
        traffic = Traffic(short_share=short_share, turns=turns, think=think)
        fleets = Fleets(found)
        asked = rates_of(rates) or [round(load * fleets.most(traffic), 2) for load in LOADS]
        settings = [
            Setting(routing, count, rate, traffic, requests, group, seed)
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
                row = to_row(conditions, began, digest, setting, seen)
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
    sizes = (setting.replicas, setting.members, setting.requests, setting.seed)
    return simulation_key(digest, setting.routing, sizes, setting.rate, asdict(setting.traffic))


def to_row(conditions: Conditions, began: str, digest: str, setting: Setting, seen: Seen) -> SimulationRow:
    """The row of a setting."""
    return SimulationRow(
        **conditions.model_dump(),
        time=began,
        inputs_sha256=digest,
        routing=setting.routing,
        replicas=setting.replicas,
        group=setting.members,
        groups=setting.groups,
        rate=setting.rate,
        requests=setting.requests,
        seed=setting.seed,
        traffic=asdict(setting.traffic),
        **{each.name: getattr(seen, each.name) for each in fields(seen)},
    )


def named(text: str) -> list[str]:
    """Names parted by commas, each once."""
    return list(dict.fromkeys(text.split(",")))


def rates_of(text: str) -> list[float]:
    """Rates parted by commas; none where there is no text.

    Raises:
        ValueError: For what is no number above 0.
    """
    try:
        found = [float(each) for each in text.split(",") if each]
    except ValueError as error:
        raise ValueError(f"--rates {text!r} is no list of numbers such as 5,7.5") from error
    if not all(0 < each < float("inf") for each in found):
        raise ValueError(f"--rates {text!r}: a rate is a number above 0")
    return found


def counts_of(text: str) -> list[int]:
    """Numbers of replicas parted by commas.

    Raises:
        ValueError: For what is no whole number.
    """
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--replicas {text!r} is no list of whole numbers such as 16,10000") from error
