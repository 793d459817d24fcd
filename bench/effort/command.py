"""`python -m sigma0.bench effort`: policies of verification effort, simulated with stated odds or really run."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from pydantic import TypeAdapter
from rich.console import Console

from sigma0.bench.core.conditions import device_name, git_commit, utc_now, weights_sha256
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import measuring, step_bar, tell_report
from sigma0.bench.effort import measure
from sigma0.calibrate.bootstrap import share
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import load
from sigma0.reason.chat import LocalChat


def effort(
    real: Annotated[
        bool, typer.Option("--real", help="Ask models about the micro-world, instead of rolling dice.")
    ] = False,
    n: Annotated[
        int | None, typer.Option("-n", "--n", min=2, help="Runs of each policy: 2000, or 40 real ones.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the dice, or of the stories and the samples.")] = 0,
    rates: Annotated[str, typer.Option(help="Odds of the simulation as JSON, over the default ones.")] = "{}",
    solver: Annotated[str, typer.Option(help="With --real, the model that solves and corrects.")] = "pocket",
    verifier: Annotated[str, typer.Option(help="With --real, the model that verifies.")] = "pocket-large",
    temperature: Annotated[float, typer.Option(help="With --real, of all texts.")] = 0.7,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Success, false accepts and cost of five policies of verification effort, beside flat high effort."""
    with measuring(threads):
        if real:
            report = _measured(n or 40, seed, solver, verifier, temperature, as_json)
        else:
            report = _simulated(n or 2000, seed, TypeAdapter(measure.Rates).validate_python(json.loads(rates)), as_json)
    if not tell_report(asdict(report), out, as_json):
        return
    console = Console()
    measure.table(report).show(no_wrap=("policy",))
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items() if name != "versions"))
    if report.first_right is not None:
        console.print(f"first solutions right: {report.first_right.value:.1%}")


def _simulated(n: int, seed: int, rates: measure.Rates, hidden: bool) -> measure.EffortReport:
    summaries = []
    with progress_bar("simulated runs", n * len(measure.POLICIES), hidden) as advance:
        for config in measure.POLICIES:
            summaries.append(
                measure.summarise(
                    config.policy, [measure.simulate(config, rates, seed + number) for number in range(n)]
                )
            )
            advance(n * len(summaries))
    settings: dict[str, Any] = {"runs": n, "seed": seed, "rates": asdict(rates)}
    return measure.EffortReport("simulation", settings, "cost", tuple(summaries))


def _measured(n: int, seed: int, solver: str, verifier: str, temperature: float, hidden: bool) -> measure.EffortReport:
    started = utc_now()
    chats = {name: LocalChat(*load(name, dtype="float32"), name) for name in dict.fromkeys((solver, verifier))}
    items = list(measure.questions(n, seed))
    summaries: list[measure.PolicySummary] = []
    with step_bar("runs", n * len(measure.POLICIES), hidden) as advance:
        for config in measure.POLICIES:
            runs = []
            for place, item in enumerate(items):
                runs.append(measure.check(config, item, chats[solver], chats[verifier], temperature, place))
                advance()
            summaries.append(measure.summarise(config.policy, runs))
    settings = {
        "solver": solver,
        "verifier": verifier,
        "solver_sha256": weights_sha256(solver),
        "verifier_sha256": weights_sha256(verifier),
        "temperature": temperature,
        "questions": f"{n} after places, one about each story, micro-world, test split, hard half, seed {seed}",
        "runs": n,
        "device": device_name(chats[solver].model.device),
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
        "time": started,
    }
    # the same seeds for every policy: the first solutions are the same
    first = share(sum(run.first_right for run in runs), n)
    return measure.EffortReport("measurement", settings, "passes", tuple(summaries), first)
