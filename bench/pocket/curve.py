"""Accuracy by loop over training, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.core.output import drawing
from sigma0.bench.pocket.recipe import Recipe
from sigma0.bench.pocket.train import Report
from sigma0.commands.console import depth_style

_POINTS = 120


def draw_curve(reports: Sequence[Report], recipe: Recipe, path: Path) -> None:
    """Draw the share of a training batch's answers that are right, by loop, averaged over spans of steps.

    Args:
        reports: Figures of the steps, in order (`train.read_log`).
        recipe: Its stages are marked.
        path: A .png or .svg to write.

    Raises:
        ValueError: If there is nothing to draw, or the run is not of this recipe.
    """
    if not reports:
        raise ValueError(f"no step was logged, so there is nothing to draw into {path}")
    most = max(loop for report in reports for loop in report.answers)
    if most > recipe.loops or reports[-1].step >= recipe.steps:
        raise ValueError(
            f"the log has {most} loops and step {reports[-1].step}, the recipe {recipe.loops} loops and {recipe.steps} "
            "steps: name the recipe of the run"
        )
    span = max(1, len(reports) // _POINTS)
    with drawing([path], (8, 4.5), dpi=150) as figure:
        axes = figure.subplots()
        for loop in range(1, recipe.loops + 1):
            steps, shares = [], []
            for start in range(0, len(reports), span):
                part = [report for report in reports[start : start + span] if loop in report.answers]
                if part:
                    steps.append(part[-1].step)
                    shares.append(100 * sum(report.answers[loop] for report in part) / len(part))
            axes.plot(steps, shares, color=depth_style(loop, recipe.loops), label=f"loop {loop}")
        for step, name in recipe.stages():
            axes.axvline(step, color="0.7", linewidth=0.8)
            axes.annotate(name, (step, 101), fontsize=7, rotation=90, ha="center", annotation_clip=False)
        axes.set(xlabel="step", ylabel="answers right, % (training batches)", ylim=(0, 100))
        figure.legend(fontsize=8, loc="outside right center")
