"""Rows about K/V in few bits as tables and as a picture: what each codec costs, and where it fails."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from sigma0.bench.core.output import BenchTable, drawing, with_interval
from sigma0.bench.core.rows import AnyRow, KVRow


def codec_name(row: KVRow) -> str:
    """A codec with the bits of its loops."""
    bits = f" {'-'.join(map(str, row.bits))}" if row.codec == "residual" else ""
    return f"{row.codec}{bits} / {row.group}"


COLUMNS: Mapping[str, Callable[[KVRow], str]] = {
    "context": lambda row: str(row.context or "own"),
    "codec": codec_name,
    "bits/number": lambda row: f"{row.number_bits:g}",
    "kB/token": lambda row: f"{row.token_bytes / 1e3:.2f} of {row.token_bytes_computed / 1e3:.2f}",
    "in few bits": lambda row: f"{row.coded_share:.0%}",
    "agreement": lambda row: with_interval(row.agreement),
    "KL": lambda row: f"{row.kl.value:.2g}",
    "depths moved": lambda row: f"{row.depths_changed.value:.1%}",
    "same text": lambda row: with_interval(row.same_text),
    "ms/token": lambda row: "-" if row.milliseconds_per_token is None else f"{row.milliseconds_per_token:.3g}",
    "faster": lambda row: with_interval(row.speed_ratio, 2, 1, ""),
    "sequences": lambda row: f"{row.concurrent} / {row.concurrent_computed}" if row.concurrent else "-",
}
LEFT = ("context", "codec")


def conditions_text(row: KVRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    engine = ""
    if row.kv_memory:
        engine = (
            f"; sequences: of {row.concurrent_tokens} tokens in {row.kv_memory / 1e6:.1f} MB of K/V at once before one "
            f"is preempted, in few bits / as computed ({row.same_alone} of {row.compared_alone} answers are those "
            "given alone)"
        )
    timed = f"timed behind {row.timed_context} ids, {row.rounds} interleaved rounds" if row.rounds else "not timed"
    return (
        f"{row.named}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: {row.n} prompts "
        f"({row.prompts}), at most {row.max_new_tokens} new tokens, segments of {row.segment}; {timed}{engine}; "
        f"{row.dtype}, {row.device}, {row.threads} thread(s), {row.code}."
    )


def whole(runs: Sequence[Sequence[KVRow]]) -> str:
    """All runs with their conditions, as Markdown."""
    tables = [(rows[0], BenchTable.of(COLUMNS, rows, left=LEFT).markdown()) for rows in runs]
    return "\n".join(f"{conditions_text(first)}\n\n{table}\n" for first, table in tables)


def print_rows(rows: Sequence[KVRow]) -> None:
    """The rows of a run in the terminal."""
    BenchTable.of(COLUMNS, rows, conditions_text(rows[0]), LEFT).show(no_wrap=COLUMNS, compact=True)
    Console().print(
        "own: prompts of their own length; in few bits: of what new tokens are read over; agreement, KL: at full "
        "depth; faster: time as computed over that in few bits"
    )


def latest_kv(rows: Sequence[AnyRow]) -> list[list[KVRow]]:
    """The latest row of each codec, by model, dtype, context and segment; contexts ascending, many bits first."""
    latest: dict[tuple[str, str, int, int], dict[tuple[object, ...], KVRow]] = {}
    for row in sorted((row for row in rows if isinstance(row, KVRow)), key=lambda row: row.time):
        run = latest.setdefault((row.model, row.dtype, row.context, row.segment), {})
        run[row.codec, row.bits, row.group] = row
    return [sorted(run.values(), key=lambda row: -row.number_bits) for _, run in sorted(latest.items())]


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
