"""`python -m sigma0.bench stability`: what a token's spectrum predicts, in figures and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from sigma0.bench.core.options import LookUps, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import BenchTable, drawing, tell_report
from sigma0.bench.pocket.card import estimate_text
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.errors import needs_extra
from sigma0.models.load import load

if TYPE_CHECKING:
    from sigma0.bench.stability.measure import Answer


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

        looped, tokenizer = load(model, device="cpu", dtype="float32")
        with progress_bar("questions", n, hidden=as_json) as advance:
            answers = read_answers(looped, tokenizer, n, seed, advance, LOOK_UPS if look_ups else MIX)
        found = study(model, looped.num_loops, answers)
        if picture is not None:
            _draw(answers, found, picture)
    if not tell_report(found, out, as_json):
        return
    console = Console()
    console.print(
        f"{model}: {found['answers']} answers, {found['wrong']:.1%} wrong; the fit speaks at {found['spoke']:.1%} of "
        f"the least sure tokens\nradius {found['radius'][1]:.2f} along the path, {found['jacobian'][1]:.2f} of the map "
        "(medians)"
    )
    if (rank := found["rank_correlation"]) is not None:
        console.print(f"rank correlation of the two {estimate_text(rank, 2)}")
    areas = []
    for name, area in found["auroc"].items():
        # of one that is constant there is none
        told = ("-", "") if area is None else (f"{area['value']:.3f}", "{:.3f} to {:.3f}".format(*area["interval"]))
        areas.append((name, *told))
    console.print(BenchTable(("score", "AUROC", "95 %"), areas, "AUROC for a wrong answer").rich())
    for fate, share in found["fates"].items():
        wrong = found["wrong_by_fate"][fate]
        console.print(f"{fate}: {share:.1%} of the least sure tokens, {wrong:.1%} of those answers wrong")


def _draw(answers: "Sequence[Answer]", found: dict[str, Any], file: Path) -> None:
    """Left the two radii of each answer, right how well each score tells wrong answers."""
    from sigma0.bench.stability.measure import SPEAKS

    with drawing([file], (11, 4.5)) as figure:
        left, right = figure.subplots(1, 2)
        for wrong, colour, name in ((False, "#4575b4", "right"), (True, "#d73027", "wrong")):
            rows = [each for each in answers if each.wrong == wrong and each.path["residual"] <= SPEAKS]
            jacobians, radii = [each.jacobian for each in rows], [each.path["radius"] for each in rows]
            left.scatter(jacobians, radii, s=9, c=colour, label=name)
        left.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        left.set(xlabel="radius of the loop map (Jacobian)", ylabel="radius along the path", title=found["model"])
        left.legend()
        known = [(name, area) for name, area in found["auroc"].items() if area is not None]
        known.sort(key=lambda named: named[1]["value"])
        values = [area["value"] for _, area in known]
        errors = [[abs(area["interval"][side] - area["value"]) for _, area in known] for side in (0, 1)]
        right.errorbar(values, range(len(known)), xerr=errors, fmt="o", color="#4575b4")
        right.axvline(0.5, color="grey", linewidth=0.8)
        names = [name for name, _ in known]
        right.set(yticks=range(len(names)), yticklabels=names, xlabel="AUROC for a wrong answer", xlim=(0, 1))
