"""`python -m sigma0.bench verdict`: the switches on and off, and what the verdict tells."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from sigma0.estimates import Estimate
from sigma0.extras import needs_extra
from sigma0.loading import load
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers
from sigma0.verdict import DoorPolicy


def verdict(
    model: Annotated[
        str, typer.Argument(help="Shipped name, folder or hub id of a model of pocket's world.")
    ] = "pocket",
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out stories, one question each.")] = 500,
    hard: Annotated[bool, typer.Option("--hard", help="Only questions of the hard half.")] = False,
    tau_c: Annotated[float, typer.Option(help="Proximity that must not be reached.")] = 0.5,
    tau_g: Annotated[float, typer.Option(help="Groundedness that must be passed.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the stories.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Fidelity, accuracy, savings and escalations for every switch, and wrong answers told from right ones."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.verdicts import SWITCHES, measure, questions

        policy = DoorPolicy(tau_c=tau_c, tau_g=tau_g)
        looped, tokenizer = load(model, dtype="float32")
        total = n * (1 + len(SWITCHES))
        with progress_bar("answers", total, hidden=as_json) as advance:
            done = iter(range(1, total + 1))
            report = measure(looped, tokenizer, model, questions(n, seed, hard), policy, lambda: advance(next(done)))
    told = {"hard_half_only": hard, "policy": policy.model_dump(), **report.to_dict()}
    text = json.dumps(told, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    console = Console()
    table = Table(title=f"{model}: {report.answers} answers")
    for name in ("switches", "same text", "right", "passes_saved", "broken tokens", "escalated"):
        table.add_column(name, justify="left" if name == "switches" else "right")
    for row in report.rows:
        shares = (row.same_text, row.right, row.passes_saved)
        table.add_row(row.setting, *map(_percent, shares), str(row.broken), _percent(row.escalated))
    console.print(table)
    table = Table(title="wrong answers told from right ones")
    for name in ("score of doubt", "AUROC", "AURC", "e-AURC", "AUGRC", "coverage at 5 % risk"):
        table.add_column(name, justify="left" if name == "score of doubt" else "right")
    for name, each in report.separations.items():
        figures = [f"{value:.4f}" for value in (each.aurc, each.excess_aurc, each.augrc)]
        table.add_row(name, "-" if each.auroc is None else f"{each.auroc:.3f}", *figures, f"{each.coverage:.1%}")
    console.print(table)
    if report.kept_right is not None and report.opened_for_right is not None:
        console.print(
            f"the converge door opens for {report.opened_for_right:.1%} of the right answers; of what it lets through "
            f"{report.kept_right:.1%} are right, {report.difference:+.1f} points beside all"
        )


def _percent(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.1%}"
