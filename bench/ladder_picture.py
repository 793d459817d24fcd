"""Accuracy against cost as a picture."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.ladders import LARGE, SMALL, Point


def draw_ladder(points: Sequence[Point], file: Path, title: str) -> None:
    """One line for each curve, the two models alone as stars."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sigma0"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    alone = [point for point in points if point.setting.family in (SMALL, LARGE)]
    curves = dict.fromkeys(point.setting.family for point in points if point not in alone)
    for place, name in enumerate(curves):
        curve = sorted((point for point in points if point.setting.family == name), key=lambda point: point.cost.value)
        costs, rights = [100 * point.cost.value for point in curve], [100 * point.accuracy.value for point in curve]
        axes.plot(costs, rights, marker="os^Dv<>PX*"[place], markersize=4, color=f"C{place}", label=name)
    for point in alone:
        axes.plot(100 * point.cost.value, 100 * point.accuracy.value, "*", markersize=14, color="black")
        axes.annotate(point.setting.family, (100 * point.cost.value, 100 * point.accuracy.value), (6, -12),
                      textcoords="offset points")  # fmt: skip
    above = next(point for point in alone if point.setting.family == LARGE)
    axes.axhline(95 * above.accuracy.value, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="cost, % of the larger model alone (passes x block bytes, prompts included)", ylabel="right, %",
             title=title)  # fmt: skip
    axes.legend()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=110)
    plt.close(figure)
