"""The stability study as a picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.stability.measure import SPEAKS, Answer, Stability


def draw_stability(answers: Sequence[Answer], found: Stability, file: Path) -> None:
    """Left the two radii of each answer, right how well each score tells wrong answers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sigma0"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
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
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=110)
    plt.close(figure)
