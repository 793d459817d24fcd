"""`python -m sigma0.bench verdict`, `promise` and `worlds`: what a verdict tells, and where its promise ends."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.core.conditions import git_commit
from sigma0.bench.core.options import HardHalf, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import measuring, step_bar, tell_report
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Threads
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
    with measuring(threads):
        from sigma0.bench.pocket.prompts import micro_world
        from sigma0.bench.verdict.measure import asked, measure, read_strange
        from sigma0.bench.verdict.scores import VerdictClient
        from sigma0.bench.verdict.tables import report_tables

        looped, tokenizer = load(model, dtype="float32")
        prompts, strange, name = list(micro_world(n, "test", seed, hard)), read_strange(), Path(model).name
        with step_bar("answers", asked(n, len(strange)), hidden=as_json) as advance:
            config, policy = looped.resolve_exit_config(None), looped.door_policy
            client = VerdictClient(looped, tokenizer, config, policy, advance)
            report = measure(client, name, prompts, strange, seed, risk)
        if tell_report(asdict(report), out, as_json):
            typer.echo("\n\n".join(report_tables({name: report})))


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
    with measuring(threads):
        from sigma0.bench.verdict.promise import draw_doors, open_pool, report_promise
        from sigma0.bench.verdict.tables import promise_table

        looped, tokenizer = load(model, dtype="float32")
        config, base = looped.resolve_exit_config(None), replace(looped.door_policy, rule="confidence")
        answers = open_pool(looped, tokenizer, pool, n, seed, as_json)
        with progress_bar("calibrations", draws, hidden=as_json) as advance:
            doors = draw_doors(answers, base, (fit, test), draws, risk, confidence, advance)
        name = Path(model).name
        report = report_promise(doors, name, config.to_dict(), answers, (fit, test), risk, confidence)
        if tell_report(asdict(report), out, as_json):
            typer.echo(promise_table({name: report}))


def worlds(
    sets: Annotated[int, typer.Option(min=1, help="Sets of answers drawn in each world.")] = 1000,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate a risk in simulated worlds: how often it is kept, and how often a door is found, beside an oracle."""
    with measuring():
        from sigma0.bench.verdict.tables import worlds_table
        from sigma0.bench.verdict.worlds import WORLDS, measure, report_worlds

        with progress_bar("calibrations", sets * len(WORLDS), hidden=as_json) as advance:
            rows = measure(WORLDS, sets, advance)
        if tell_report(report_worlds(rows, sets, git_commit()), out, as_json):
            typer.echo(worlds_table(rows))
