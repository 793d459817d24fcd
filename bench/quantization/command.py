"""`python -m sigma0.bench quantization`: weights of int8 and int4 beside floats."""

from functools import partial
from typing import Annotated, Any

import typer

from sigma0.bench.core.ledger import append_rows, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile, Rounds
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.quantization.measure import measure, print_rows
from sigma0.bench.speed.shapes import SHAPES, conditions_of, open_model, prompt_ids
from sigma0.calibrate.prompts import encode_prompts
from sigma0.checkpoints import shipped_models
from sigma0.commands.console import compiling
from sigma0.commands.options import Device, Runner, StatedDtype, Threads
from sigma0.config import ExitConfig
from sigma0.decode.runners import choose_runner
from sigma0.models.quantization import QUANTIZATIONS


def quantization(
    model: Annotated[str, typer.Argument(help="Shipped name; left out with --shape.")] = "",
    shape: Annotated[
        str,
        typer.Option(help=f"A random checkpoint instead, of which bytes and time mean something: {', '.join(SHAPES)}."),
    ] = "",
    to: Annotated[str, typer.Option(help="Some of these, separated by commas.")] = ",".join(QUANTIZATIONS),
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out questions, for fidelity.")] = 60,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each answer at most.")] = 32,
    device: Device = "auto",
    dtype: StatedDtype = "bfloat16",
    floats: Annotated[str, typer.Option(help="dtype of the model with floats; by default as --dtype.")] = "",
    runner: Runner = "auto",
    threads: Threads = 1,
    context: Annotated[int, typer.Option(min=2, help="Prompt tokens of what is timed.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of what is timed.")] = 48,
    rounds: Rounds = 7,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Bytes, time, agreement and depths with weights of int8 and int4, beside the same model with floats; greedy."""
    with measuring(threads):
        if bool(shape) == bool(model):
            raise ValueError("give either a model or --shape")
        if model and model not in shipped_models():
            raise ValueError(
                f"the questions are about pocket's world: one of {', '.join(shipped_models())}, got {model!r}"
            )
        check_ledger(out)
        models: dict[str | None, Any] = {}
        for name in (None, *dict.fromkeys(to.split(","))):
            models[name], tokenizer = open_model(model, shape, device, dtype if name else floats or dtype, name)
            models[name].runner, models[name].progress = choose_runner(runner, models[name]).name, compiling
        stored = models[None]
        ids, source = prompt_ids(stored, tokenizer, model, 1, context, new_tokens)
        full = ExitConfig(mode="full")
        if shape:
            prompts, asked, configs = [], [tuple(ids[0].tolist())], [full]
        else:
            prompts = asked = encode_prompts(stored, tokenizer, list(micro_world(n)), max_new_tokens)
            source, configs = "pocket, test split, seed 0", [full, stored.resolve_exit_config(None)]
        conditions = partial(
            conditions_of, model=model, shape=shape, source=source, rows=asked, new_tokens=max_new_tokens, batch=1
        )
        with step_bar("runs", len(configs) * len(models) * (rounds + 1), hidden=as_json) as advance:
            rows = measure(models, conditions, configs, ids, new_tokens, rounds, prompts, advance)
        append_rows(out, rows)
    tell_rows(rows, as_json, lambda: print_rows(rows), f"{len(rows)} rows in {out}")
