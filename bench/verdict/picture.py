"""What every feature adds to a model's confidence, as one picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.core.output import drawing
from sigma0.bench.verdict.features import FeatureUse
from sigma0.calibrate.confidence import FeatureFigure


def draw_features(uses: Sequence[FeatureUse], figures: Sequence[FeatureFigure], file: Path, title: str) -> None:
    """Three panels, a line for each feature: AUROC alone, log loss saved in the fit, AUROC lost where it is shuffled.

    Args:
        uses: On held-out answers.
        figures: Of the fit.
        file: Where to draw, as .svg or .png.
        title: Of the picture.
    """
    gains = {figure.name: figure for figure in figures}
    ranked = sorted(uses, key=lambda use: (use.stored, use.drop.value if use.drop else 0.0, use.auroc or 0.0))
    places = range(len(ranked))
    colors = ["C1" if use.stored else "C0" for use in ranked]
    with drawing([file], (11, 9)) as figure:
        alone, saved, lost = figure.subplots(1, 3, sharey=True)
        alone.barh(places, [(use.auroc or 0.5) - 0.5 for use in ranked], left=0.5, color=colors)
        alone.set(xlabel="AUROC of the feature alone, held out", yticks=list(places), ylim=(-1, len(ranked)))
        alone.set_yticklabels([use.name for use in ranked], fontsize="small")
        known = [(place, gains[use.name]) for place, use in enumerate(ranked) if use.name in gains]
        for place, told in known:
            if told.gain is not None and told.error is not None:
                saved.errorbar(
                    1000 * told.gain, place, xerr=2000 * told.error, fmt="o", markersize=3, color=colors[place]
                )
        saved.axvline(0, color="grey", linewidth=0.8)
        saved.set_xscale("symlog", linthresh=1)
        saved.set(
            xlabel="log loss that it saves in the fit, 1/1000 nats\n(of one not read: beside those read; +- 2 errors)"
        )
        for place, use in enumerate(ranked):
            if use.drop is not None:
                ends = [[use.drop.value - use.drop.interval[0]], [use.drop.interval[1] - use.drop.value]]
                lost.barh(place, use.drop.value, color="C1", xerr=ends)
        lost.set(xlabel="AUROC lost where it is shuffled, held out")
        for axes in (alone, saved, lost):
            axes.grid(axis="x", alpha=0.3)
        figure.suptitle(f"{title}: orange is read by the confidence")
