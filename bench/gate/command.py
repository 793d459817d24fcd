"""`python -m sigma0.bench gate`: what the exit gate knows."""

import json
from dataclasses import asdict
from typing import Annotated

import torch
import typer

from sigma0.bench.core.options import ExitJson, StorySeed
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, Device, ModelArgument, StatedDtype, Threads
from sigma0.config import ExitConfig
from sigma0.errors import needs_extra
from sigma0.models.load import load


def gate(
    model: ModelArgument = "pocket",
    exit_config: ExitJson = "",
    n: Annotated[int, typer.Option("-n", "--n", help="Held-out stories, one question each.")] = 1000,
    rules_n: Annotated[int, typer.Option(help="The first of them, on which the exit rules are compared.")] = 200,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    seed: StorySeed = 0,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Exit depth beside difficulty and the oracles, and saturation as a sign of a wrong answer."""
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.gate.measure import measure_gate
        from sigma0.bench.gate.tables import print_gate

        config = ExitConfig.parse(json.loads(exit_config)) if exit_config else None
        looped, tokenizer = load(model, device=device, dtype=dtype)
        with progress_bar("questions", 2 * n + 4, hidden=as_json) as advance:
            report = measure_gate(looped, tokenizer, model, config, n, rules_n, split, seed, advance)
    typer.echo(json.dumps(asdict(report), indent=1)) if as_json else print_gate(report)
