"""The curves of the proximity study."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sigma0.bench.core.output import drawing


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Share of loops found over the share of false alarms, the latter on a log scale."""
    with drawing([file], (6, 4), dpi=100) as figure:
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot([max(false, 1e-4) for false, _ in curve], [true for _, true in curve], label=name)
        axes.set(xscale="log", xlabel="false alarms", ylabel="loops found", xlim=(1e-4, 1), ylim=(0, 1.02))
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)
