"""Rows of speed runs as tables: in the terminal, and as Markdown."""

import json
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, percent
from sigma0.bench.core.rows import AnyRow, SpeedRow
from sigma0.bench.speed.decoders import ADAPTIVE, OTHERS
from sigma0.bench.speed.roofline import EXPLANATION, LAUNCHES, bandwidth_text, launch_table, roofline_table

COLUMNS: Mapping[str, Callable[[SpeedRow], str]] = {
    "way": lambda row: row.way,
    "ms/token": lambda row: f"{row.milliseconds_per_token.value:.4g}",
    "passes": lambda row: f"{row.passes_per_token:.2f}",
    "rows": lambda row: f"{row.rows_per_token:.2f}",
    "faster": lambda row: f"{row.speed_ratio.value:.2f}" if row.speed_ratio else "-",
    "95 %": lambda row: f"{row.speed_ratio.low:.2f}-{row.speed_ratio.high:.2f}" if row.speed_ratio else "-",
    "ideal": lambda row: f"{row.ideal:.2f}",
    "of ideal": lambda row: percent(row.share_of_ideal),
    "GB/s": lambda row: f"{row.weight_bandwidth / 1e9:.1f}",
    "text": lambda row: "-" if row.same_tokens is None else "same" if row.same_tokens else "other",
}


def conditions_text(row: SpeedRow) -> str:
    """What the rows of a run were measured with, in a sentence or two."""
    course = "" if row.course is None else f" Course: {row.course.source}."
    machine = row.device if row.product_ms is None else f"{row.device}; a fixed product in {row.product_ms:.1f} ms"
    return (
        f"{row.named}, {row.parameters / 1e6:,.1f} M parameters, {row.total_loops} loops: batch {row.batch_size}, "
        f"context {row.context}, {row.max_new_tokens} new tokens, {row.rounds} rounds, {row.dtype}, {machine}, "
        f"{row.threads} thread(s), by the {row.by}, runner {row.runner}, {row.code}.{course}"
    )


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """A run with its conditions, as Markdown."""
    return f"{_conditions(rows)} {rest_text(rows)}\n\n{BenchTable.of(COLUMNS, rows).markdown()}"


def rule_text(rows: Sequence[SpeedRow]) -> str:
    """The exit rule of a run that replays no course, and the drafts of self-speculation."""
    row = next((row for row in rows if row.way in ADAPTIVE and row.course is None), None)
    rule = ""
    if row is not None:
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
        rule = f" Rule: {row.mode} ({settings})."
    drafted = next((row for row in rows if row.way == "self-speculation"), None)
    if drafted is None:
        return rule
    return f"{rule} Self-speculation drafts {drafted.settings['length']} tokens at loop {drafted.settings['depth']}."


def speed_parts(rows: Sequence[AnyRow]) -> list[str]:
    """The page on speed: the last run of each kind, then what those that say it read, and how fast that might be.

    What a GPU said comes first.
    """
    runs = latest_speed_runs(rows)
    on_gpu, parts = [run for run in runs if run[0].device.startswith("cuda")], []
    others = [run for run in runs if run not in on_gpu]
    for title, some in (("## On a GPU", on_gpu), ("## On a CPU", others)):
        if some:
            parts += [title, *(speed_table(run) for run in some)]
        tables = [(run, table) for run in some if (table := roofline_table(run)) is not None]
        if tables:
            parts += ["### Roofline", EXPLANATION]
        for run, table in tables:
            parts.append(f"{conditions_text(_told(run))} {bandwidth_text(run)}\n\n{table.markdown()}")
    launches = launch_table([row for run in runs for row in run])
    return [*parts, "## Launches", LAUNCHES, launches.markdown()] if launches is not None else parts


def _conditions(rows: Sequence[SpeedRow]) -> str:
    return conditions_text(_told(rows)) + rule_text(rows)


def _told(rows: Sequence[SpeedRow]) -> SpeedRow:
    """The row that says the most of its run's conditions: one of ours, with a course where one is replayed."""
    ours = [row for row in rows if row.way not in OTHERS] or rows
    return next((row for row in ours if row.course is not None), ours[0])


def print_speed(rows: Sequence[SpeedRow]) -> None:
    """The rows of a run in the terminal."""
    BenchTable.of(COLUMNS, rows, _conditions(rows)).show(no_wrap=COLUMNS, compact=True)
    Console().print(f"{rest_text(rows)}\nfaster: time at full depth over this way's; passes, rows: for each token")
    bytes_read = roofline_table(rows, terminal=True)
    if bytes_read is not None:
        bytes_read.show(no_wrap=bytes_read.headings, compact=True)
        Console().print(f"{bandwidth_text(rows)} ideal: ms of a token's bytes at that speed; rest/pass: us")


def rest_text(rows: Sequence[SpeedRow]) -> str:
    """What all ways share: reading the prompt, and memory."""
    readers = {row.way if row.way in OTHERS else "sigma0": row.prompt_tokens_per_second for row in rows}
    prompts = ", ".join(f"{reader} {speed:.4g}" for reader, speed in readers.items())
    used, kept = rows[0].kv_bytes_in_use / 1e6, rows[0].kv_bytes_allocated / 1e6
    peak = max(row.peak_bytes for row in rows) / 1e9
    memory = f"K/V: {used:.4g} MB in use, {kept:.4g} MB reserved. Most memory in use: {peak:.2f} GB."
    return f"Prompt tokens/s: {prompts}. {memory}"


def latest_speed_runs(rows: Sequence[AnyRow]) -> list[list[SpeedRow]]:
    """The rows of the last speed run of each kind, in the order they were measured."""
    runs = runs_of(rows, SpeedRow, lambda row: (row.time, row.run))
    latest = {_kind(run): run for run in sorted(runs.values(), key=lambda run: run[0].time)}
    return sorted(latest.values(), key=lambda run: run[0].time)


# Of a row's conditions, what two speed runs of one kind may differ in.
_OTHERWISE = {
    *("model_sha256", "settings_sha256", "parameters", "prompts", "prompts_sha256", "n"),
    *("commit", "versions", "product_ms"),
}


def _kind(run: Sequence[SpeedRow]) -> str:
    """What two speed runs share that differ in time alone: model, machine, size, runner, rules and courses."""
    size = run[0].model_dump(include={"context", *Conditions.model_fields} - _OTHERWISE)
    ways = [(row.way, row.by, row.runner, row.mode, row.settings, row.course and row.course.source) for row in run]
    return json.dumps([size, ways])
