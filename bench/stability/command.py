"""`python -m sigma0.bench stability`: what a token's spectrum predicts, in figures and a picture."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sigma0.bench.core.options import LookUps, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import tell_report
from sigma0.bench.core.tables import BenchTable
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.errors import needs_extra
from sigma0.models.load import load


def stability(
    model: WorldModel = "pocket",
    n: Stories = 300,
    seed: StorySeed = 0,
    look_ups: LookUps = False,
    threads: Threads = 1,
    out: ReportFile = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw them, as .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """The spectrum of a token's loops beside the loop map's own radius, and beside right and wrong answers."""
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.pocket.world import LOOK_UPS, MIX
        from sigma0.bench.stability.measure import read_answers, study
        from sigma0.bench.stability.picture import draw_stability

        looped, tokenizer = load(model, device="cpu", dtype="float32")
        with progress_bar("questions", n, hidden=as_json) as advance:
            answers = read_answers(looped, tokenizer, n, seed, advance, LOOK_UPS if look_ups else MIX)
        found = study(model, looped.num_loops, answers)
        if picture is not None:
            draw_stability(answers, found, picture)
    if not tell_report(found.to_dict(), out, as_json):
        return
    console = Console()
    console.print(
        f"{model}: {found.answers} answers, {found.wrong:.1%} wrong; the fit speaks at {found.spoke:.1%} of the least "
        f"sure tokens\nradius {found.radius[1]:.2f} along the path, {found.jacobian[1]:.2f} of the map (medians)"
    )
    if found.rank_correlation is not None:
        low, high = found.rank_correlation.interval
        console.print(f"rank correlation of the two {found.rank_correlation.value:.2f} ({low:.2f} to {high:.2f})")
    areas = [
        (name, *(("-", "") if area is None else (f"{area.value:.3f}", "{:.3f} to {:.3f}".format(*area.interval))))
        for name, area in found.auroc.items()
    ]
    console.print(BenchTable(("score", "AUROC", "95 %"), areas, "AUROC for a wrong answer").rich())
    for fate, share in found.fates.items():
        console.print(
            f"{fate}: {share:.1%} of the least sure tokens, {found.wrong_by_fate[fate]:.1%} of those answers wrong"
        )
