"""The stability study as a picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.core.output import drawing
from sigma0.bench.stability.measure import SPEAKS, Answer, Stability


def draw_stability(answers: Sequence[Answer], found: Stability, file: Path) -> None:
    """Left the two radii of each answer, right how well each score tells wrong answers."""
    with drawing([file], (11, 4.5)) as figure:
        left, right = figure.subplots(1, 2)
        for wrong, colour, name in ((False, "#4575b4", "right"), (True, "#d73027", "wrong")):
            rows = [each for each in answers if each.wrong == wrong and each.path["residual"] <= SPEAKS]
            left.scatter(
                [each.jacobian for each in rows], [each.path["radius"] for each in rows], s=9, c=colour, label=name
            )
        left.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        left.set(xlabel="radius of the loop map (Jacobian)", ylabel="radius along the path", title=found.model)
        left.legend()
        known = {name: each for name, each in found.auroc.items() if each is not None}
        names = sorted(known, key=lambda name: known[name].value)
        values = [known[name].value for name in names]
        errors = [[abs(known[n].interval[side] - known[n].value) for n in names] for side in (0, 1)]
        right.errorbar(values, range(len(names)), xerr=errors, fmt="o", color="#4575b4")
        right.axvline(0.5, color="grey", linewidth=0.8)
        right.set(yticks=range(len(names)), yticklabels=names, xlabel="AUROC for a wrong answer", xlim=(0, 1))
