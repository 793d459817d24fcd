"""`python -m sigma0.bench ladder`: accuracy against cost, in a table, a picture and the ledger."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe, utc_now, weights_sha256
from sigma0.bench.core.ledger import append_rows
from sigma0.bench.core.options import OWN, AnswerTokens, AsJsonLines, CurvesPicture, LedgerFile, StorySeed, parsed_exit
from sigma0.bench.core.output import BenchTable, measuring, step_bar, tell_rows
from sigma0.bench.core.rows import LadderRow
from sigma0.bench.ladder import measure as study
from sigma0.bench.pocket.prompts import micro_world
from sigma0.calibrate.prompts import Prompt, encode_prompts, read_prompts
from sigma0.commands.options import Threads, check_known
from sigma0.ladder import Rung
from sigma0.models.load import load, load_causal

TASK = "pocket"
UNITS = {"token": study.token_settings, "answer": study.answer_settings}
COLUMNS: Mapping[str, Callable[[LadderRow], str]] = {
    "setting": lambda row: study.setting_name(row.family, row.policy),
    "right": lambda row: f"{row.accuracy.value:.1%}",
    "95 %": lambda row: f"{row.accuracy.low:.1%}-{row.accuracy.high:.1%}",
    "cost": lambda row: f"{row.cost.value:.1%}",
    "time": lambda row: f"{row.seconds.value:.1%}",
    "handed up": lambda row: f"{row.handed_up:.1%}",
    "catch-ups": lambda row: f"{row.catch_ups:.2f}",
}


def ladder(
    small: Annotated[str, typer.Argument(help="The lower model: shipped name, folder or hub id.")] = "pocket",
    large: Annotated[str, typer.Argument(help="The larger one; with another tokenizer only answers go up.")] = (
        "pocket-large"
    ),
    prompts: Annotated[
        str, typer.Option(help="`pocket` for the micro-world's held-out stories, or a file of prompts.")
    ] = TASK,
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Prompts at most.")] = 200,
    everything: Annotated[bool, typer.Option("--all", help="All stories, not only the hard half.")] = False,
    exit_config: Annotated[str, typer.Option(help="Exit rule of the lower model as JSON; by default its own.")] = "",
    unit: Annotated[str, typer.Option(help="What goes up: token, with answers beside it, or answer alone.")] = "token",
    max_new_tokens: AnswerTokens = 24,
    seed: StorySeed = 0,
    threads: Threads = 1,
    picture: CurvesPicture = None,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Accuracy against cost of handing up, beside both models alone, chance, and entropy alone."""
    with measuring(threads):
        check_known("unit", unit, UNITS)
        config = parsed_exit(exit_config)
        below = load(small, dtype="float32")
        lower = Rung.local(*below, Path(small).name, config)
        upper = Rung.local(*load_causal(large, dtype="float32"), Path(large).name)
        parts = _prompts(prompts, n, seed, not everything)
        points = UNITS[unit](below[0].door_policy)
        shared = {
            "time": utc_now(),
            "above": large,
            "above_sha256": weights_sha256(large),
            "exit_config": below[0].resolve_exit_config(config).to_dict(),
        }
        total = sum(len(asked) for asked, _ in parts.values()) * (1 + len(points))
        rows: list[LadderRow] = []
        with step_bar("answers", total, hidden=as_json) as advance:
            for part, (asked, where) in parts.items():
                ids = encode_prompts(*below, asked, max_new_tokens)
                conditions = describe(below[0], small, where, ids, [item.answer for item in asked], max_new_tokens)
                every = {**conditions.model_dump(), **shared, "part": part}
                rows += study.measure(lower, upper, asked, points, max_new_tokens, every, advance)
        append_rows(out, rows)
        reported = [row for row in rows if row.part == "report"]
        if picture is not None:
            title = f"{Path(small).name} to {Path(large).name}: {reported[0].prompts}, n = {reported[0].n}"
            study.draw_ladder(reported, picture, title)
    tell_rows(rows, as_json, lambda: _print(rows), f"{len(rows)} rows in {out}")


def _prompts(source: str, n: int, seed: int, hard: bool) -> dict[str, tuple[list[Prompt], str]]:
    """The prompts of each part of a run, and where they come from; of a file the first n are reported on.

    The next n of a file are chosen on, if it holds so many as two.
    """
    if source == TASK:
        kind = "hard half, " * hard
        return {
            part: (list(micro_world(n, split, seed, hard)), f"{TASK}, {split} split, {kind}seed {seed}")
            for part, split in (("choice", "calibration"), ("report", "test"))
        }
    result = list(islice(read_prompts(Path(source)), 2 * n))
    if len(result) < 2:
        raise ValueError(f"{source!r} holds one prompt: intervals over prompts take at least 2")
    name = Path(source).name
    parts = {"choice": (result[n:], f"{name}, from {n + 1}")} if len(result) > n + 1 else {}
    return {**parts, "report": (result[:n], name)}


def _print(rows: Sequence[LadderRow]) -> None:
    console = Console()
    reported = [row for row in rows if row.part == "report"]
    BenchTable.of(COLUMNS, reported, "cost and time: of the larger model's alone").show()
    families = dict.fromkeys(row.family for row in reported if "only" not in row.family)
    curves = {family: [row for row in reported if row.family == family] for family in families}
    for best in study.shown(rows):
        if best.family not in curves:
            continue
        others = {other: study.at_cost(rest, best.cost.value) for other, rest in curves.items() if other != best.family}
        beside = ", ".join(f"{other} {value:.1%}" for other, value in others.items() if value is not None)
        output = f"{best.accuracy.value:.1%} right at {best.cost.value:.1%} of the cost"
        console.print(f"{study.setting_name(best.family, best.policy)}: {output}; there {beside}")
