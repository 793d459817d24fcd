"""`python -m sigma0.bench verdict`: the switches on and off, and what the verdict tells."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console

from sigma0.bench.core.options import HardHalf, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.tables import BenchTable
from sigma0.calibrate.bootstrap import Estimate
from sigma0.commands.console import one_line_errors, progress_bar, quiet_transformers
from sigma0.commands.options import AsJson, Threads
from sigma0.errors import needs_extra
from sigma0.models.load import load

if TYPE_CHECKING:
    from sigma0.bench.verdict.measure import VerdictReport


def verdict(
    model: WorldModel = "pocket",
    n: Stories = 500,
    hard: HardHalf = False,
    seed: StorySeed = 0,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Fidelity, accuracy, savings and escalations for every switch, and wrong answers told from right ones.

    Exit rule, fates and policy are the checkpoint's own: `sigma0 calibrate --objective risk` sets them.
    """
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.pocket.prompts import micro_world
        from sigma0.bench.verdict.measure import SETTINGS, measure

        looped, tokenizer = load(model, dtype="float32")
        prompts = list(micro_world(n, "test", seed, hard))
        config, policy = looped.resolve_exit_config(None), looped.door_policy
        total = n * (1 + len(SETTINGS))
        with progress_bar("answers", total, hidden=as_json) as advance:
            done = iter(range(1, total + 1))
            name = Path(model).name
            report = measure(looped, tokenizer, name, prompts, config, policy, lambda: advance(next(done)))
    told = {"hard_half_only": hard, **report.to_dict()}
    text = json.dumps(told, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        print_report(report)


def print_report(report: "VerdictReport") -> None:
    """Prints both tables, and what the converge door does."""
    console = Console()
    cells = []
    for row in report.rows:
        shares = (row.same_text, row.right, row.passes_saved)
        cells.append((row.setting, *map(_percent, shares), str(row.broken), _percent(row.escalated)))
    headings = ("switches", "same text", "right", "passes_saved", "broken tokens", "escalated")
    console.print(BenchTable(headings, cells, f"{report.model}: {report.answers} answers").rich())
    cells = []
    for name, score in report.separations.items():
        figures = [f"{value:.4f}" for value in (score.aurc, score.excess_aurc, score.augrc)]
        cells.append((name, "-" if score.auroc is None else f"{score.auroc:.3f}", *figures, f"{score.coverage:.1%}"))
    headings = ("score of doubt", "AUROC", "AURC", "e-AURC", "AUGRC", "coverage at 5 % risk")
    console.print(BenchTable(headings, cells, "wrong answers told from right ones").rich())
    more = report.points_more
    console.print(
        f"the converge door opens for {_percent(report.opened_for_right)} of the right answers; "
        f"{_percent(report.kept_right)} of what it lets through are right"
        + ("" if more is None else f", {more.value:+.1f} points ({more.interval[0]:+.1f} to {more.interval[1]:+.1f})")
    )


def _percent(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.1%}"
