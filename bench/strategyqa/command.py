"""`python -m sigma0.bench strategyqa`: levels of control on yes or no questions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.console import Console

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AnswerTokens, AsJsonLines, LedgerFile, WorkerCount
from sigma0.bench.core.output import tell_rows
from sigma0.bench.core.rows_tasks import StrategyQARow
from sigma0.bench.core.workers import KeptResults, worker_pool
from sigma0.bench.strategyqa import options
from sigma0.bench.strategyqa.asking import MAX_TOKENS, AskSettings
from sigma0.bench.strategyqa.level import Level
from sigma0.bench.strategyqa.measure import FEW, conditions_of, to_rows
from sigma0.bench.strategyqa.opening import WORLD, Opened, Opening
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE, variant
from sigma0.bench.strategyqa.runner import LevelRun
from sigma0.bench.strategyqa.table import doors, draw, table
from sigma0.bench.strategyqa.work import SpreadLevels
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Device, Dtype, ServedModel, Threads
from sigma0.config import Effort


def levels(
    experiments: Annotated[
        list[str], typer.Option("-e", "--experiment", help="Levels, or all; may be repeated. L0 is what p-values need.")
    ],
    data: options.DataOption = WORLD,
    split: Annotated[str, typer.Option(help="Items that are scored: dev or train.")] = "dev",
    n: options.ItemsOption = None,
    model: ServedModel = "pocket",
    ladder: options.LadderOption = None,
    base_url: options.BaseUrlOption = None,
    effort: options.EffortOption = "medium",
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    max_new_tokens: AnswerTokens = MAX_TOKENS,
    concurrency: options.ConcurrencyOption = 16,
    retries: options.RetriesOption = 2,
    cache: options.CacheOption = None,
    paragraphs: options.ParagraphsOption = None,
    demonstrations: Annotated[Path | None, typer.Option(help="L1-ptp: traces that `distill` wrote.")] = None,
    template: Annotated[Path | None, typer.Option(help="L2: steps that `distill` wrote.")] = None,
    route: Annotated[str, typer.Option(help="L4: rules, model or verdict.")] = "rules",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    workers: WorkerCount = 1,
    picture: Annotated[Path | None, typer.Option(help="Accuracy against cost, as .svg or .png.")] = None,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Accuracy, calls and tokens of levels of control, each beside L0 on the same items.

    With several workers, those of a level that does not learn take items in turns, and one that learns is one worker's;
    a run that was cut off goes on where it stopped, once it is started again under the same conditions.
    """
    torch.set_num_threads(threads)
    with one_line_errors():
        names = chosen(experiments)
        if workers > 1 and base_url is not None:
            raise ValueError("--workers have a model each, and --base-url has none here: raise --concurrency instead")
        settings = AskSettings(cast(Effort, effort), max_new_tokens, temperature, seed)
        opening = Opening(
            data=data, split=split, n=n, model=model, ladder=ladder, base_url=base_url, device=device, dtype=dtype,
            concurrency=concurrency, retries=retries, settings=settings, cache=cache,
            paragraphs=paragraphs, demonstrations=demonstrations, template=template, route=route,
            threads=threads,
        )  # fmt: skip
        check_ledger(out)
        opened = opening.open()
        made = [(name, EXPERIMENTS[name](opened.makings)) for name in names]
        found = (
            _beside(opened, made, as_json) if workers == 1 else _spread(opening, opened, made, workers, out, as_json)
        )
        runs = [
            replace(run, level=name, variant=variant(name, opened.makings))
            for name, run in zip(names, found, strict=True)
        ]
        rows = to_rows(runs, opened)
        for row in rows:
            append_row(out, row)
        if picture is not None:
            draw(rows, picture)
    tell_rows(rows, as_json, lambda: Console().print(table(rows)), closing(rows, out))


def _beside(opened: Opened, made: Sequence[tuple[str, Level]], hidden: bool) -> list[LevelRun]:
    """Runs levels in this process."""
    total = len(made) * len(opened.items)
    with progress_bar("items", total, hidden) as advance:
        done = iter(range(1, total + 1))
        return [opened.run(level, opened.items, lambda: advance(next(done))) for _, level in made]


def _spread(
    opening: Opening, opened: Opened, made: Sequence[tuple[str, Level]], workers: int, out: Path, hidden: bool
) -> list[LevelRun]:
    """Runs levels by workers, with a file beside the ledger in which their results are kept until all are there."""
    model = opened.asked.model
    path = out.with_name(f".{out.stem}-{conditions_of(opened).run}.work.jsonl")
    gpus = int(model is not None and model.device.type == "cuda")
    with KeptResults(path) as kept, worker_pool(workers, opening.threads, gpus) as pool:
        spread = SpreadLevels(pool, opening.resolved(), opened, kept)
        with progress_bar("parts", spread.count(made), hidden) as advance:
            runs = spread.run(made, advance)
        kept.forget()
    if pool.redone:
        typer.echo(f"{pool.redone} parts were done again, since the worker that had them died", err=True)
    return runs


def chosen(experiments: Sequence[str]) -> tuple[str, ...]:
    """The levels that are named; all means each of them once.

    Raises:
        ValueError: For one that there is not, or one that is named twice.
    """
    if list(experiments) == ["all"]:
        return ONCE
    unknown = [name for name in experiments if name not in EXPERIMENTS]
    if unknown:
        raise ValueError(f"no such level: {unknown[0]!r}; there are all, {', '.join(EXPERIMENTS)}")
    if len(set(experiments)) < len(experiments):
        raise ValueError(f"a level is named twice: {', '.join(experiments)}")
    return tuple(experiments)


def closing(rows: Sequence[StrategyQARow], out: Path) -> str:
    """What stands under the table."""
    told = f"{len(rows)} rows in {out}; always the commoner label: {rows[0].majority:.1%}"
    opened = [f"{row.level}: {doors(row)}" for row in rows if row.doors]
    if opened:
        told = f"Doors that the verdicts on answers opened: {'; '.join(opened)}\n{told}"
    if rows[0].n < FEW:
        told = f"With {rows[0].n} items, under {FEW}, differences of 10 points are noise.\n{told}"
    return told
