"""`python -m sigma0.bench speed`: time every way of decoding in turn, print and append."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from sigma0.bench.core.conditions import describe, describe_weights
from sigma0.bench.core.ledger import LEDGER, Conditions, append_row
from sigma0.bench.core.options import AsJsonLines, ExitJson, LedgerFile, Rounds
from sigma0.bench.core.output import tell_rows
from sigma0.bench.core.replay import Trace
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.speed.courses import STATED, described, recorded, stated
from sigma0.bench.speed.measure import WAYS, Plan, measure
from sigma0.bench.speed.shapes import SEED, SHAPES, digest, random_model
from sigma0.bench.speed.table import print_speed
from sigma0.calibrate.prompts import encode_prompts
from sigma0.checkpoints import shipped_models
from sigma0.commands.console import compiling, one_line_errors, progress_bar, quiet_transformers
from sigma0.commands.options import Device, Runner, StatedDtype, Threads
from sigma0.config import ExitConfig
from sigma0.decode.runners import choose_runner
from sigma0.models.load import load

# No question of pocket's world has fewer ids than this.
_SHORTEST = 12


def speed(
    model: Annotated[str, typer.Argument(help="Shipped name, folder or hub id; left out with --shape.")] = "",
    shape: Annotated[str, typer.Option(help=f"A random checkpoint instead: {', '.join(SHAPES)}.")] = "",
    ways: Annotated[str, typer.Option(help="Some of these, parted by commas.")] = ",".join(WAYS),
    exit_config: ExitJson = "",
    course: Annotated[
        str,
        typer.Option(
            help="Replay this course of tokens in place of the exit rule: a model to record it from, or a JSON file "
            "with total_loops, exits and settled. A shape replays a stated course by default."
        ),
    ] = "",
    device: Device = "auto",
    dtype: StatedDtype = "bfloat16",
    runner: Runner = "auto",
    threads: Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    context: Annotated[int, typer.Option(min=2, help="Prompt tokens of each.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 48,
    rounds: Rounds = 7,
    prompt_rounds: Annotated[int, typer.Option(min=1, help="How often the prompt is read, for its own time.")] = 3,
    out: LedgerFile = LEDGER,
    as_json: AsJsonLines = False,
) -> None:
    """Decode time of full depth, of adaptive depth and of transformers' own decoding, in turn; greedy, no end."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors():
        if bool(model) == bool(shape):
            raise ValueError("give either a model or --shape")
        config = ExitConfig.parse(json.loads(exit_config)) if exit_config else None
        looped, ids, source = _open(model, shape, device, dtype, batch, context, new_tokens)
        looped.runner, looped.announce = choose_runner(runner, looped).name, compiling
        trace, told = _trace(course, bool(shape), config)
        if trace is not None:
            trace = trace.scaled(looped.num_loops)
            told = described(trace, told)
        rule = looped.resolve_exit_config(config or (None if model else ExitConfig().filled()))
        config = replace(rule, after_exit="finish")
        plan = Plan(tuple(ways.split(",")), config, trace, told, new_tokens, rounds, prompt_rounds)
        conditions = _conditions(looped, model, shape, source, ids, new_tokens)
        with progress_bar("runs", plan.steps, hidden=as_json) as advance:
            rows = measure(looped, ids, plan, conditions, advance)
        for row in rows:
            append_row(out, row)
    tell_rows(rows, as_json, lambda: print_speed(rows), f"{len(rows)} rows in {out}")


def _open(
    model: str, shape: str, device: str, dtype: str, batch: int, context: int, new_tokens: int
) -> tuple[Any, Tensor, str]:
    """The model, its prompts `[B, S]` and where they come from."""
    looped, tokenizer = (random_model(shape, device, dtype), None) if shape else load(model, device=device, dtype=dtype)
    looped.generation_config.eos_token_id = None
    limit = looped.config.max_position_embeddings
    if context + new_tokens > limit:
        raise ValueError(
            f"--context {context} and --new-tokens {new_tokens} are more than the {limit} positions of this model"
        )
    if tokenizer is not None and model in shipped_models():
        # A shipped model knows its own world alone; on random ids its tokens settle late.
        questions = encode_prompts(looped, tokenizer, list(micro_world(batch * (context // _SHORTEST + 1))), new_tokens)
        # Questions in a row, of which each sequence reads the last ids: all end with a question.
        ids = torch.tensor([list(chain(*questions[row::batch]))[-context:] for row in range(batch)])
        return looped, ids.to(looped.device), "questions of pocket's world in a row, test split, seed 0"
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, looped.config.vocab_size, (batch, context), generator=generator)
    return looped, ids.to(looped.device), f"random ids, seed {SEED}"


def _trace(course: str, by_default: bool, config: ExitConfig | None) -> tuple[Trace | None, str]:
    if course and not course.endswith(".json"):
        return recorded(course, config)
    if config is not None and (course or by_default):
        raise ValueError("a stated course replaces the exit rule: leave --exit-config out, or name a model as --course")
    if course:
        return stated(Path(course))
    return (STATED, "stated") if by_default else (None, "")


def _conditions(looped: Any, model: str, shape: str, source: str, ids: Tensor, new_tokens: int) -> Conditions:
    rows = [tuple(row) for row in ids.tolist()]
    answers = [None] * len(rows)
    if shape:
        weights = digest(shape)
        return describe_weights(
            looped, f"random {shape}", weights, weights, source, rows, answers, new_tokens, batch_size=len(rows)
        )
    return describe(looped, model, source, rows, answers, new_tokens, batch_size=len(rows))
