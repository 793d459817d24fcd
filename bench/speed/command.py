"""`python -m sigma0.bench speed`: time every way of decoding in turn, print and append."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sigma0.bench.core.ledger import append_rows
from sigma0.bench.core.options import OWN, AsJsonLines, ExitJson, LedgerFile, Rounds, parsed_exit
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.speed.courses import chosen_course, described
from sigma0.bench.speed.decoders import OTHERS, PUBLISHED
from sigma0.bench.speed.measure import MORE_WAYS, WAYS, Plan, measure
from sigma0.bench.speed.peer import published
from sigma0.bench.speed.self_speculation import Drafting, fit_drafting
from sigma0.bench.speed.shapes import SHAPES, conditions_of, open_model, prompt_ids
from sigma0.bench.speed.table import print_speed
from sigma0.commands.console import compiling
from sigma0.commands.options import Device, Quantization, Recurrence, Runner, StatedDtype, Stride, Threads
from sigma0.config import ExitConfig
from sigma0.decode.runners import choose_runner


def speed(
    model: Annotated[str, typer.Argument(help="Shipped name, folder or hub id; left out with --shape.")] = "",
    shape: Annotated[str, typer.Option(help=f"A random checkpoint instead: {', '.join(SHAPES)}.")] = "",
    ways: Annotated[
        str, typer.Option(help=f"Some of these, separated by commas, or {', '.join(MORE_WAYS)}.")
    ] = ",".join(WAYS),
    exit_config: ExitJson = "",
    course: Annotated[
        str,
        typer.Option(
            help="Replay this course of tokens in place of the exit rule: recorded (what `course` has written), "
            "stated, a model to record it from now, or a JSON file with total_loops, exits and settled. A shape "
            "replays the stated course by default, but with --course rule."
        ),
    ] = "",
    drafts: Annotated[
        str,
        typer.Option(
            help="Depth and length of self-speculation's drafts, such as 2,4; by default the fastest of a small grid "
            "on a prompt of the calibration split; of the fewest passes along a course."
        ),
    ] = "",
    device: Device = "auto",
    dtype: StatedDtype = "bfloat16",
    runner: Runner = "auto",
    quantization: Quantization = None,
    recurrence: Recurrence = None,
    stride: Stride = None,
    threads: Threads = 1,
    by: Annotated[str, typer.Option(help="Who decodes: library, or engine (the server's).")] = "library",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    context: Annotated[int, typer.Option(min=2, help="Prompt tokens of each.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 48,
    rounds: Rounds = 7,
    prompt_rounds: Annotated[int, typer.Option(min=1, help="How often the prompt is read, for its own time.")] = 3,
    published_code: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a model's published code and a config.json that has its auto_map: one more way, "
            f"{PUBLISHED}, runs it with the same weights at full depth."
        ),
    ] = None,
    published_python: Annotated[
        str, typer.Option(help="Python that has the torch and the transformers which that code needs.")
    ] = sys.executable,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Decode time of full depth, of adaptive depth and of transformers' own decoding, in turn; greedy, no end."""
    with measuring(threads):
        if bool(model) == bool(shape):
            raise ValueError("give either a model or --shape")
        config = parsed_exit(exit_config)
        looped, tokenizer = open_model(model, shape, device, dtype, quantization, recurrence, stride)
        looped.generation_config.eos_token_id = None
        ids, source = prompt_ids(looped, tokenizer, model, batch, context, new_tokens)
        chosen = choose_runner(runner, looped)
        looped.runner, looped.progress = chosen.name, compiling
        trace, output = chosen_course(course, bool(shape), config)
        if trace is not None:
            trace = trace.scaled(looped.num_loops)
            output = described(trace, output)
        rule = looped.resolve_exit_config(config or (None if model else ExitConfig().filled()))
        config = replace(rule, after_exit="finish")
        names = (*ways.split(","), *([] if published_code is None else [PUBLISHED]))
        drafting = Drafting.parse(drafts) if drafts else None
        if drafting is None and "self-speculation" in names:
            fit_ids, _ = prompt_ids(looped, tokenizer, model, batch, context, new_tokens, "calibration")
            drafting = fit_drafting(looped, fit_ids, new_tokens, trace)
        plan = Plan(names, config, trace, output, new_tokens, rounds, prompt_rounds, by, drafting)
        rows_of_ids = [tuple(row) for row in ids.tolist()]
        conditions = conditions_of(looped, model, shape, source, rows_of_ids, new_tokens, batch)
        peer_code: Any = nullcontext()
        if published_code is not None:
            peer_code = published(looped, ids, new_tokens, published_python, published_code)
        with peer_code as peer, step_bar("runs", plan.steps, hidden=as_json) as advance:
            if peer is not None:
                conditions = conditions.model_copy(update={"versions": {**conditions.versions, **peer.versions}})
            rows = measure(looped, ids, plan, conditions, advance, peer)
        ran = {row.runner for row in rows if row.way not in OTHERS}
        if runner != "auto" and ran - {runner}:
            typer.echo(f"{runner} was asked for, but some ran {', '.join(sorted(ran))}: {chosen.reason}", err=True)
        append_rows(out, rows)
    tell_rows(rows, as_json, lambda: print_speed(rows), f"{len(rows)} rows in {out}")
