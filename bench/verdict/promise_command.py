"""`python -m sigma0.bench promise`: how often a calibrated door keeps its stated risk."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.options import ReportFile, StorySeed, WorldModel
from sigma0.bench.core.output import tell_report
from sigma0.commands.console import one_line_errors, progress_bar, quiet_transformers
from sigma0.commands.options import AsJson, Threads
from sigma0.errors import needs_extra
from sigma0.models.load import load


def promise(
    model: WorldModel = "pocket",
    pool: Annotated[
        Path | None, typer.Option(help="File of the model's answers as JSON lines; written first where it is missing.")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=10, help="Stories of the calibration split that fill it.")] = 24000,
    fit: Annotated[int, typer.Option(min=5, help="Answers of each fit.")] = 1000,
    test: Annotated[int, typer.Option(min=1, help="Answers of each test.")] = 1000,
    draws: Annotated[int, typer.Option(min=1, help="Calibrations that are drawn.")] = 400,
    risk: Annotated[float, typer.Option(help="Wrong answers allowed among those let through.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="With which that is to hold.")] = 0.95,
    seed: StorySeed = 1,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Draw calibrations from a pool of answers, and count how often the chosen door keeps the stated risk."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.verdict.pools import open_pool
        from sigma0.bench.verdict.promise import draw_doors, report_promise
        from sigma0.bench.verdict.tables import promise_table

        looped, tokenizer = load(model, dtype="float32")
        config = looped.resolve_exit_config(None)
        answers = open_pool(looped, tokenizer, pool, n, seed, as_json)
        with progress_bar("calibrations", draws, hidden=as_json) as advance:
            doors = draw_doors(
                answers, replace(looped.door_policy, rule="confidence"), (fit, test), draws, risk, confidence, advance
            )
        name = Path(model).name
        report = report_promise(doors, name, config.to_dict(), answers, (fit, test), risk, confidence)
        if tell_report(report.to_dict(), out, as_json):
            typer.echo(promise_table({name: report}))
