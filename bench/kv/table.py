"""Rows about K/V in few bits as tables: in the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.console import Console

from sigma0.bench.core.conditions import short_commit
from sigma0.bench.core.ledger import AnyRow
from sigma0.bench.core.output import BenchTable
from sigma0.bench.core.rows import KVRow
from sigma0.bench.fidelity.table import with_interval

COLUMNS = (
    "context", "codec", "bits/number", "kB/token", "in few bits", "agreement", "KL", "depths moved", "same text",
    "ms/token", "faster", "sequences",
)  # fmt: skip


def codec_name(row: KVRow) -> str:
    """A codec with the bits of its loops."""
    bits = f" {'-'.join(map(str, row.bits))}" if row.codec == "residual" else ""
    return f"{row.codec}{bits} / {row.group}"


def cells(row: KVRow) -> list[str]:
    """One row as text, column by column."""
    ratio = row.speed_ratio
    return [
        str(row.context or "own"),
        codec_name(row),
        f"{row.number_bits:g}",
        f"{row.token_bytes / 1e3:.2f} of {row.token_bytes_computed / 1e3:.2f}",
        f"{row.coded_share:.0%}",
        with_interval(row.agreement),
        f"{row.kl.value:.2g}",
        f"{row.depths_changed.value:.1%}",
        "-" if row.same_text is None else with_interval(row.same_text),
        "-" if row.milliseconds_per_token is None else f"{row.milliseconds_per_token:.3g}",
        "-" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        "-" if not row.concurrent else f"{row.concurrent} / {row.concurrent_computed}",
    ]


def conditions_text(row: KVRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
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
        f"{row.dtype}, {row.device}, {row.threads} thread(s), {versions}, commit {short_commit(row.commit)}."
    )


def whole(runs: Sequence[Sequence[KVRow]]) -> str:
    """All runs with their conditions, as Markdown."""
    parts = []
    for rows in runs:
        table = BenchTable(COLUMNS, [cells(row) for row in rows], left=COLUMNS[:2]).markdown()
        parts.append(f"{conditions_text(rows[0])}\n\n{table}\n")
    return "\n".join(parts)


def print_rows(rows: Sequence[KVRow]) -> None:
    """The rows of a run in the terminal."""
    table = BenchTable(COLUMNS, [cells(row) for row in rows], conditions_text(rows[0]), left=COLUMNS[:2])
    Console(width=max(Console().width, 200)).print(table.rich(no_wrap=COLUMNS, compact=True))
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
