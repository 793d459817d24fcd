"""Agreement over bits as a picture: what each codec costs, and where it fails."""

from collections.abc import Sequence
from pathlib import Path

from sigma0.bench.core.output import drawing
from sigma0.bench.core.rows import KVRow

_MARKS = {"int8": "s", "int4": "D", "residual": "o"}


def draw_kv(runs: Sequence[Sequence[KVRow]], file: Path) -> None:
    """One line for each context of a model: disagreement on a logarithmic axis, and KL beside it."""
    with drawing([file], (11, 4.5)) as figure:
        axes = figure.subplots(1, 2)
        for rows in runs:
            name = f"{rows[0].model}, {rows[0].context or 'own'} ids"
            for axis, values in (
                (axes[0], [1 - row.agreement.value for row in rows]),
                (axes[1], [row.kl.value for row in rows]),
            ):
                bits = [row.number_bits for row in rows]
                (line,) = axis.plot(bits, values, linewidth=0.8, label=name)
                for row, x, y in zip(rows, bits, values, strict=True):
                    axis.plot(x, y, _MARKS[row.codec], color=line.get_color(), markersize=5)
        axes[0].axhline(0.01, color="grey", linewidth=0.8, linestyle="--")
        axes[0].set(ylabel="new tokens with another argmax", title="dashed: 1 %")
        axes[0].set_yscale("symlog", linthresh=1e-3)
        axes[1].set(ylabel="KL, nats", title="square: int8, diamond: int4, circle: residual")
        axes[1].set_yscale("log")
        for axis in axes:
            axis.set(xlabel="bits a number")
            axis.legend(fontsize=8)
