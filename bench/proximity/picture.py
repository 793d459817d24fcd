"""The curves of the proximity study."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Share of loops found over the share of false alarms, the latter on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sigma0"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot([max(false, 1e-4) for false, _ in curve], [true for _, true in curve], label=name)
    axes.set(xscale="log", xlabel="false alarms", ylabel="loops found", xlim=(1e-4, 1), ylim=(0, 1.02))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
