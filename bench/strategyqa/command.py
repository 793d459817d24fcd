"""`python -m sigma0.bench strategyqa`: levels of control on yes or no questions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import typer
from rich.console import Console

from sigma0.bench.ledger import LEDGER, append_row, check_ledger
from sigma0.bench.output import tell_rows
from sigma0.bench.rows_tasks import StrategyQARow
from sigma0.bench.strategyqa import options
from sigma0.bench.strategyqa.adaptive import Route
from sigma0.bench.strategyqa.asking import MAX_TOKENS, AskSettings
from sigma0.bench.strategyqa.measure import FEW, score
from sigma0.bench.strategyqa.opening import WORLD, open_bench, read_items
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE, Makings, variant
from sigma0.bench.strategyqa.scored import to_rows
from sigma0.bench.strategyqa.table import doors, draw, table
from sigma0.effort import Effort
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers


def levels(
    experiments: Annotated[
        list[str], typer.Option("-e", "--experiment", help="Levels, or all; may be repeated. L0 is what p-values need.")
    ],
    data: options.DataOption = WORLD,
    split: Annotated[str, typer.Option(help="Items that are scored: dev or train.")] = "dev",
    n: options.ItemsOption = None,
    model: options.ModelOption = "pocket",
    ladder: options.LadderOption = None,
    base_url: options.BaseUrlOption = None,
    effort: options.EffortOption = "medium",
    temperature: options.TemperatureOption = 0.0,
    seed: options.SeedOption = 0,
    max_new_tokens: options.MaxNewTokensOption = MAX_TOKENS,
    concurrency: options.ConcurrencyOption = 16,
    retries: options.RetriesOption = 2,
    cache: options.CacheOption = None,
    paragraphs: options.ParagraphsOption = None,
    demonstrations: Annotated[Path | None, typer.Option(help="L1-ptp: traces that `distill` wrote.")] = None,
    template: Annotated[Path | None, typer.Option(help="L2: steps that `distill` wrote.")] = None,
    route: Annotated[str, typer.Option(help="L4: rules, model or verdict.")] = "rules",
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    threads: options.ThreadsOption = 1,
    picture: Annotated[Path | None, typer.Option(help="Accuracy against cost, as .svg or .png.")] = None,
    out: options.OutOption = LEDGER,
    as_json: options.JsonOption = False,
) -> None:
    """Accuracy, calls and tokens of levels of control, each beside L0 on the same items."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors():
        names = chosen(experiments)
        if route not in get_args(Route):
            raise ValueError(f"no such route: {route!r}; there are {', '.join(get_args(Route))}")
        items, train, where = read_items(data, split, n, seed)
        check_ledger(out)
        settings = AskSettings(cast(Effort, effort), max_new_tokens, temperature, seed)
        bench = open_bench(model, ladder, base_url, device, dtype, concurrency, retries, settings, cache)
        makings = Makings(train, paragraphs, None, demonstrations, template, cast(Route, route))
        runs = []
        with progress_bar("items", len(names) * len(items), hidden=as_json) as advance:
            done = iter(range(1, len(names) * len(items) + 1))
            for name in names:
                run = bench.run(EXPERIMENTS[name](makings), items, lambda: advance(next(done)))
                runs.append(replace(run, level=name, variant=variant(name, makings)))
        rows = to_rows(score(runs), bench, items, where)
        for row in rows:
            append_row(out, row)
        if picture is not None:
            draw(rows, picture)
    tell_rows(rows, as_json, lambda: Console().print(table(rows)), closing(rows, out))


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
