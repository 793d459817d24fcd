"""Levels beside L0 on the same items, as rows, in a table for the terminal and for Markdown, and in a picture.

Accuracy with intervals, paired tests, and what it took.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from sigma0.bench.core.conditions import Conditions, Figure, device_name, git_commit, library_versions, utc_now
from sigma0.bench.core.ledger import runs_of
from sigma0.bench.core.output import BenchTable, drawing, with_interval
from sigma0.bench.core.rows import AnyRow, StrategyQARow
from sigma0.bench.strategyqa.level import LevelRun
from sigma0.bench.strategyqa.opening import Opened
from sigma0.bench.strategyqa.statistics import holm, majority, mcnemar
from sigma0.calibrate.bootstrap import share

BASELINE = "L0"
# under so many items, differences of 10 points are noise
FEW = 200


def to_rows(runs: Sequence[LevelRun], opened: Opened, against: str = BASELINE) -> list[StrategyQARow]:
    """The rows of a run, which has just ended."""
    settings = opened.settings
    common = {
        **conditions_of(opened).model_dump(),
        "time": utc_now(),
        "effort": settings.effort,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
    return [StrategyQARow(**common, **entry) for entry in score(runs, against)]


def conditions_of(opened: Opened) -> Conditions:
    """What a run is measured under."""
    asked, model = opened.asked, opened.asked.model
    known = [(item.qid, item.question, item.answer) for item in opened.items]
    return Conditions(
        model=asked.chat.name,
        model_sha256=asked.identity,
        settings_sha256=asked.settings,
        total_loops=0 if model is None else getattr(model, "num_loops", 1),
        parameters=0 if model is None else sum(parameter.numel() for parameter in model.parameters()),
        device="endpoint" if model is None else device_name(model.device),
        dtype=asked.dtype,
        threads=torch.get_num_threads(),
        prompts=opened.where,
        prompts_sha256=sha256(repr(known).encode()).hexdigest(),
        n=len(opened.items),
        batch_size=opened.concurrency,
        max_new_tokens=opened.settings.max_tokens,
        commit=git_commit(),
        versions=library_versions(),
    )


def score(runs: Sequence[LevelRun], against: str = BASELINE) -> list[dict[str, Any]]:
    """What a row says of each of some levels, by the names of `StrategyQARow`.

    Runs may have gone through fewer items each; all are held against the first of the level `against` that there is.
    """
    base = next((run for run in runs if run.level == against), None)
    right = {} if base is None else {entry.qid: entry.right for entry in base.answered}
    pairs = [
        [] if run is base else [(right[entry.qid], entry.right) for entry in run.answered if entry.qid in right]
        for run in runs
    ]
    raw = {str(place): mcnemar(*zip(*result, strict=True)) for place, result in enumerate(pairs) if result}
    corrected = holm(raw)
    rows = []
    for place, (run, result) in enumerate(zip(runs, pairs, strict=True)):
        usage = asdict(run.usage)
        del usage["calls"]
        n = len(run.answered)
        rows.append(
            {
                "level": run.level,
                "variant": run.variant,
                "labels": run.labels,
                "accuracy": Figure.of(share(run.right, n)),
                "majority": majority([entry.label for entry in run.answered]).value,
                "misses": dict(run.misses),
                "against": against,
                "difference": sum(current - first for first, current in result) / len(result) if result else None,
                "p_value": raw.get(str(place)),
                "p_holm": corrected.get(str(place)),
                "calls": sum(len(entry.purposes) for entry in run.answered) / n,
                "doors": dict(Counter(door for entry in run.answered for door in entry.doors)),
                **usage,
            }
        )
    return rows


def name(row: StrategyQARow) -> str:
    """A level with what it was made with."""
    return f"{row.level} ({row.variant})" if row.variant else row.level


def doors(row: StrategyQARow) -> str:
    """Doors that verdicts on a level's answers opened, each with how often; "" where there are no verdicts."""
    return ", ".join(f"{door} {count}" for door, count in sorted(row.doors.items()))


def p_text(value: float | None) -> str:
    """A p-value in two digits; "-" for none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.005 else "< 0.01"


COLUMNS: Mapping[str, Callable[[StrategyQARow], str]] = {
    "level": name,
    "n": lambda row: str(row.n),
    "right": lambda row: with_interval(row.accuracy),
    "difference": lambda row: "-" if row.difference is None else f"{100 * row.difference:+.1f}",
    "p": lambda row: p_text(row.p_value),
    "p, Holm": lambda row: p_text(row.p_holm),
    "missed": lambda row: str(sum(row.misses.values())),
    "calls an item": lambda row: f"{row.calls:.1f}",
    "tokens an item": lambda row: f"{row.completion_tokens / row.n:.0f}",
    "passes an item": lambda row: f"{row.loop_passes / row.n:.0f}" if row.loop_passes else "-",
    "seconds an item": lambda row: f"{row.seconds / row.n:.1f}",
    "doors": lambda row: doors(row) or "-",
    "labels": lambda row: row.labels,
}
# what a terminal shows, under shorter names
NARROW = {
    **{"right": "right", "difference": "diff.", "p, Holm": "p", "missed": "missed"},
    **{"calls an item": "calls", "tokens an item": "tokens", "passes an item": "passes"},
}


def latest_levels(rows: Sequence[AnyRow]) -> list[list[StrategyQARow]]:
    """The rows of the last run of each model on each set of items, in the order of their measurement.

    What was held against another level than the rest is a run of its own: a distillation.
    """
    runs = runs_of(rows, StrategyQARow, lambda row: (row.time, row.model, row.prompts))
    latest = {(model, prompts, run[0].n, run[0].against): run for (_, model, prompts), run in sorted(runs.items())}
    return sorted(latest.values(), key=lambda run: run[0].time)


def whole(rows: Sequence[StrategyQARow]) -> str:
    """The table of one run with what it was measured on, and what its noise is."""
    first = rows[0]
    table = BenchTable.of(COLUMNS, rows, left=("level", "labels")).markdown()
    few = f" With {first.n} items differences of 10 points are noise." if first.n < FEW else ""
    return (
        f"{first.named} on {first.n} items of {first.prompts}: {first.max_new_tokens} new tokens an answer at "
        f"most, effort {first.effort}, temperature {first.temperature:g}, {first.dtype}, {first.device}. Differences "
        f"are in points, against {first.against} on the same items; always saying the commoner label scores "
        f"{100 * first.majority:.1f} %. Seconds of a batch are shared by its questions.{few}\n\n{table}"
    )


def table(rows: Sequence[StrategyQARow]) -> Table:
    """The table for a terminal: what is narrow, or cannot be left out."""
    title = f"{rows[0].model} on {rows[0].prompts}, differences against {rows[0].against}"
    caption = f"{rows[0].n} items; p by Holm; calls, tokens and passes of one item"
    result = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 1, 0, 0))
    result.add_column("level", overflow="fold", min_width=11)
    for heading in NARROW.values():
        result.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(*(COLUMNS[column](row) for column in ("level", *NARROW)))
    return result


def draw(rows: Sequence[StrategyQARow], path: Path) -> None:
    """Accuracy with its interval against tokens written for each item, as .svg or .png."""
    with drawing([path], (7.5, 4.5), dpi=100) as figure:
        axes = figure.subplots()
        for row in rows:
            tokens, result = row.completion_tokens / row.n, row.accuracy
            spread = [[result.value - result.low], [result.high - result.value]]
            axes.errorbar([tokens], [result.value], yerr=spread, fmt="o", capsize=3)
            axes.annotate(name(row), (tokens, result.value), textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.axhline(rows[0].majority, color="#888888", linestyle="--", label="always the commoner label")
        axes.set_xscale("log")
        axes.set_xlabel("tokens written for an item")
        axes.set_ylabel("right answers, 95 % intervals")
        axes.set_title(f"{rows[0].model}: {rows[0].prompts}", fontsize=9)
        axes.legend(fontsize=8)
