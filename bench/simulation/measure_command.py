"""`python -m sigma0.bench passes`: times of the engine's passes and depths of its answers, for the simulation."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.options import LEDGER, OWN, AnswerTokens
from sigma0.bench.core.tables import BenchTable
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.simulation.inputs import Inputs
from sigma0.bench.simulation.table import checks_table
from sigma0.calibrate.prompts import encode_prompts
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Device, ModelArgument, StatedDtype
from sigma0.errors import needs_extra
from sigma0.models.load import load

INPUTS = LEDGER.with_name("simulation-inputs.json")
OWN_INPUTS = OWN.with_name(INPUTS.name)


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
    torch.set_num_threads(1)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.simulation.measure import LIMITS, STEPS, measure_inputs

        looped, tokenizer = load(model, device=device, dtype=dtype)
        prompts = encode_prompts(looped, tokenizer, list(micro_world(n)), max_new_tokens)
        where = "questions of pocket's world, test split, seed 0"
        most = LIMITS.max_running
        conditions = describe(looped, model, where, prompts, [None] * len(prompts), max_new_tokens, most)
        with progress_bar("steps", STEPS, hidden=as_json) as advance:
            found = measure_inputs(looped, tokenizer, conditions, prompts, looped.resolve_exit_config(None), advance)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(indent=1) + "\n")
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        print_inputs(found)
        typer.echo(f"written to {out}")


def print_inputs(found: Inputs) -> None:
    """What was found, and how well the simulation of one replica agrees with the real one."""
    times = found.pass_times
    counts, milliseconds = zip(
        *((f"{point.rows}", f"{point.milliseconds:.3f}") for point in times.by_rows), strict=True
    )
    title = f"milliseconds of a pass by its rows ({found.clock})"
    console = Console()
    console.print(BenchTable(counts, [milliseconds], title, left=()).rich())
    console.print(
        f"and {times.request_ms:.3f} for each request, {times.chunk_ms:.3f} for each chunk of a prompt, "
        f"{times.telling_ms:.3f} where a token is told, {times.token_ms:.3f} for each, {times.begun_ms:.3f} for each "
        f"request that begins and {times.ended_ms:.3f} for each that ends; "
        f"fitted to {times.passes:,} passes ({times.explained:.0%} of their variance)"
    )
    console.print(f"rounds took {min(times.paces):.2f} to {max(times.paces):.2f} times as long as that")
    console.print("the machine was loaded with {:.1f} programs on {} processors".format(*found.machine_load))
    for name, kind in found.kinds.items():
        console.print(f"{name}: {len(kind.answers)} answers of {kind.passes:.1f} passes on average")
    console.print(checks_table(found.checks).rich())
