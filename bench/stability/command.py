"""`python -m sigma0.bench stability`: what a token's spectrum predicts, in figures and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sigma0.bench.core.options import LookUps, ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import BenchTable, drawing, measuring, tell_report
from sigma0.bench.pocket.card import estimate_text
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Threads
from sigma0.models.load import load

if TYPE_CHECKING:
    from sigma0.bench.stability.measure import Answer


def stability(
    model: WorldModel = "pocket",
    n: Stories = 300,
    seed: StorySeed = 0,
    look_ups: LookUps = False,
    recurrence: Annotated[int | None, typer.Option(min=1, help="Loops at full depth, for a Raven.")] = None,
    inner_break: Annotated[bool, typer.Option("--inner-break", help="Also what the inner break changes.")] = False,
    threads: Threads = 1,
    out: ReportFile = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw them, as .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """The spectrum of a token's loops beside the loop map's own radius, and beside right and wrong answers."""
    with measuring(threads):
        from sigma0.bench.pocket.prompts import micro_world
        from sigma0.bench.pocket.world import LOOK_UPS, MIX
        from sigma0.bench.stability.measure import compare_break, read_answers, study

        looped, tokenizer = load(model, device="cpu", dtype="float32", recurrence=recurrence)
        mix = LOOK_UPS if look_ups else MIX
        with progress_bar("questions", n, hidden=as_json) as advance:
            answers = read_answers(looped, tokenizer, n, seed, advance, mix)
        result = study(model, looped.num_loops, answers)
        if inner_break:
            result["inner_break"] = compare_break(looped, tokenizer, list(micro_world(n, "test", seed, mix=mix)))
        if picture is not None:
            _draw(answers, result, picture)
    if not tell_report(result, out, as_json):
        return
    console = Console()
    console.print(
        f"{model}: {result['answers']} answers, {result['wrong']:.1%} wrong; the fit speaks at {result['spoke']:.1%} "
        f"of the least sure tokens\nradius {result['radius'][1]:.2f} along the path, "
        f"{result['jacobian'][1]:.2f} of the map (medians)"
    )
    if (rank := result["rank_correlation"]) is not None:
        console.print(f"rank correlation of the two {estimate_text(rank, 2)}")
    areas = []
    for name, area in result["auroc"].items():
        # of one that is constant there is none
        output = ("-", "") if area is None else (f"{area['value']:.3f}", "{:.3f} to {:.3f}".format(*area["interval"]))
        areas.append((name, *output))
    BenchTable(("score", "AUROC", "95 %"), areas, "AUROC for a wrong answer").show()
    if inner_break:
        rows = [
            (name, *map("{:.3g}".format, pair))
            for name, pair in result["inner_break"].items()
            if name not in ("same", "broken")
        ]
        same, broken = (result["inner_break"][name] for name in ("same", "broken"))
        title = f"the inner break: {broken:.1%} of the tokens, {same:.1%} of the answers the same"
        BenchTable(("of a token", "without", "with"), rows, title).show()
    for fate, share in result["fates"].items():
        wrong = result["wrong_by_fate"][fate]
        console.print(f"{fate}: {share:.1%} of the least sure tokens, {wrong:.1%} of those answers wrong")


def _draw(answers: "Sequence[Answer]", result: dict[str, Any], file: Path) -> None:
    """Left the two radii of each answer, right how well each score tells wrong answers."""
    from sigma0.bench.stability.measure import SPEAKS

    with drawing([file], (11, 4.5)) as figure:
        left, right = figure.subplots(1, 2)
        for wrong, colour, name in ((False, "#4575b4", "right"), (True, "#d73027", "wrong")):
            rows = [item for item in answers if item.wrong == wrong and item.path["residual"] <= SPEAKS]
            jacobians, radii = [item.jacobian for item in rows], [item.path["radius"] for item in rows]
            left.scatter(jacobians, radii, s=9, c=colour, label=name)
        left.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        left.set(xlabel="radius of the loop map (Jacobian)", ylabel="radius along the path", title=result["model"])
        left.legend()
        known = [(name, area) for name, area in result["auroc"].items() if area is not None]
        known.sort(key=lambda named: named[1]["value"])
        values = [area["value"] for _, area in known]
        errors = [[abs(area["interval"][side] - area["value"]) for _, area in known] for side in (0, 1)]
        right.errorbar(values, range(len(known)), xerr=errors, fmt="o", color="#4575b4")
        right.axvline(0.5, color="grey", linewidth=0.8)
        names = [name for name, _ in known]
        right.set(yticks=range(len(names)), yticklabels=names, xlabel="AUROC for a wrong answer", xlim=(0, 1))
