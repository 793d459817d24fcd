"""`passes` times the engine's passes and keeps depths; `simulate` makes SIMULATED fleets of replicas out of them."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import append_row, read_rows, repair
from sigma0.bench.core.options import LEDGER, OWN, AnswerTokens, AsJsonLines, LedgerFile
from sigma0.bench.core.output import BenchTable, measuring, tell_rows
from sigma0.bench.core.rows import SimulationRow
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.simulation.cluster import ROUTINGS, Traffic
from sigma0.bench.simulation.inputs import Inputs, read_inputs
from sigma0.bench.simulation.study import Fleets, Setting
from sigma0.bench.simulation.study import simulate as simulate_one
from sigma0.bench.simulation.table import checks_table, draw_simulation, print_simulation
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.commands.options import Device, ModelArgument, StatedDtype
from sigma0.models.load import load

INPUTS = LEDGER.with_name("simulation-inputs.json")
OWN_INPUTS = OWN.with_name(INPUTS.name)
# Of the most that one replica answers whose chats stay, where no rates are given: routings that part chats from their
# prefixes are full at the second already, none is before the last.
LOADS = (0.25, 0.45, 0.7, 1.0)
COMPARED = "random,least-loaded,session-affine,fleet,depth-aware,fleet-depth-aware"
Value = TypeVar("Value")


def passes(
    model: ModelArgument = "pocket-large",
    n: Annotated[int, typer.Option("-n", "--n", help="Prompts, one about each held-out story.")] = 150,
    max_new_tokens: AnswerTokens = 32,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    out: Annotated[Path, typer.Option(help="File of inputs to write.")] = OWN_INPUTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file instead of a table.")] = False,
) -> None:
    """Time the engine's passes by what is in them, and keep the exit depths of its answers for `simulate`.

    Answers under the model's own exit setting are the short traffic, those of full depth the long one.
    """
    # the clock is the CPU time of one thread
    with measuring(1):
        from sigma0.bench.simulation.measure import LIMITS, STEPS, measure_inputs

        looped, tokenizer = load(model, device=device, dtype=dtype)
        prompts = encode_prompts(looped, tokenizer, list(micro_world(n)), max_new_tokens)
        where = "questions of pocket's world, test split, seed 0"
        most = LIMITS.max_running
        conditions = describe(looped, model, where, prompts, [None] * len(prompts), max_new_tokens, most)
        with progress_bar("steps", STEPS, hidden=as_json) as advance:
            result = measure_inputs(looped, tokenizer, conditions, prompts, looped.resolve_exit_config(None), advance)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(result.model_dump_json(indent=1) + "\n")
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        print_inputs(result)
        typer.echo(f"written to {out}")


def print_inputs(result: Inputs) -> None:
    """What was found, and how well the simulation of one replica agrees with the real one."""
    times = result.pass_times
    counts = [f"{point.rows}" for point in times.by_rows]
    milliseconds = [f"{point.milliseconds:.3f}" for point in times.by_rows]
    title = f"milliseconds of a pass by its rows ({result.clock})"
    console = Console()
    BenchTable(counts, [milliseconds], title, left=()).show()
    console.print(
        f"and {times.request_ms:.3f} for each request, {times.chunk_ms:.3f} for each chunk of a prompt, "
        f"{times.telling_ms:.3f} where a token is told, {times.token_ms:.3f} for each, {times.begun_ms:.3f} for each "
        f"request that begins and {times.ended_ms:.3f} for each that ends; "
        f"fitted to {times.passes:,} passes ({times.explained:.0%} of their variance)"
    )
    console.print(f"rounds took {min(times.paces):.2f} to {max(times.paces):.2f} times as long as that")
    console.print("the machine was loaded with {:.1f} programs on {} processors".format(*result.machine_load))
    for name, kind in result.kinds.items():
        console.print(f"{name}: {len(kind.answers)} answers of {kind.passes:.1f} passes on average")
    checks_table(result.checks).show()


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
    with measuring():
        if picture is not None and picture.suffix not in (".svg", ".png"):
            raise ValueError(f"--picture {str(picture)!r}: give a name that ends in .svg or .png")
        traffic = Traffic(short_share=short_share, turns=turns, think=think)
        fleets = Fleets(*read_inputs(inputs))
        asked = _listed("--rates", [item for item in rates.split(",") if item], float, "numbers such as 5,7.5")
        if not all(0 < item < float("inf") for item in asked):
            raise ValueError(f"--rates {rates!r}: a rate is a number above 0, such as 5")
        asked = asked or [round(load * fleets.most(traffic), 2) for load in LOADS]
        counts = _listed("--replicas", replicas.split(","), int, "whole numbers such as 16,10000")
        settings = [
            Setting(routing, count, rate, traffic, requests, group, seed, runs, warm, waiting)
            for count, rate, routing in product(counts, asked, dict.fromkeys(routings.split(",")))
        ]
        repair(out)
        run = fleets.conditions.run
        known = {row.key: row for row in read_rows(out) if row.run == run and isinstance(row, SimulationRow)}
        rows = []
        with progress_bar("simulated requests", len(settings) * requests, as_json) as advance:
            for setting in settings:
                row = known.get(setting.key(fleets.digest))
                if row is None:
                    row = simulate_one(fleets, setting)
                    append_row(out, row)
                rows.append(row)
                advance(len(rows) * requests)
        if picture is not None:
            draw_simulation(rows, [picture])
    tell_rows(rows, as_json, lambda: print_simulation(rows), f"SIMULATED; {len(rows)} rows in {out}")


def _listed(option: str, texts: Sequence[str], kind: Callable[[str], Value], what: str) -> list[Value]:
    try:
        return [kind(item) for item in texts]
    except ValueError as error:
        raise ValueError(f"{option} {','.join(texts)!r} is no list of {what}") from error
