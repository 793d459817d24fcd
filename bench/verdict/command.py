"""`python -m sigma0.bench verdict`: what a verdict tells of answers, and where its promise ends."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.options import HardHalf, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import tell_report
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.errors import needs_extra
from sigma0.models.load import load


def verdict(
    model: WorldModel = "pocket",
    n: Stories = 2000,
    hard: HardHalf = False,
    risk: Annotated[float, typer.Option(help="Risk that the model's door was calibrated for.")] = 0.05,
    seed: StorySeed = 0,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Wrong answers told from right ones, the door, its features, the switches, shifts and strange prompts.

    Exit rule, fates, confidence and policy are the checkpoint's own: `sigma0 calibrate --objective risk` sets them.
    """
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.pocket.prompts import micro_world
        from sigma0.bench.verdict.asking import Asker
        from sigma0.bench.verdict.measure import asked, measure
        from sigma0.bench.verdict.strange import read_strange
        from sigma0.bench.verdict.tables import report_tables

        looped, tokenizer = load(model, dtype="float32")
        prompts, strange, name = list(micro_world(n, "test", seed, hard)), read_strange(), Path(model).name
        total = asked(n, len(strange))
        with progress_bar("answers", total, hidden=as_json) as advance:
            done = iter(range(1, total + 1))
            config, policy = looped.resolve_exit_config(None), looped.door_policy
            asker = Asker(looped, tokenizer, config, policy, lambda: advance(next(done)))
            report = measure(asker, name, prompts, strange, seed, risk)
        if tell_report(report.to_dict(), out, as_json):
            typer.echo("\n\n".join(report_tables({name: report})))
