"""`python -m sigma0.bench strategyqa`: levels of control on yes or no questions, and distillation back down."""

import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
import typer
from rich.console import Console

from sigma0.bench.conditions import device_name, git_commit
from sigma0.bench.ledger import LEDGER, append_row
from sigma0.bench.output import tell_rows
from sigma0.bench.rows import Conditions, Figure
from sigma0.bench.rows_tasks import StrategyQARow
from sigma0.bench.strategyqa.adaptive import Route
from sigma0.bench.strategyqa.asking import MAX_TOKENS, AskSettings
from sigma0.bench.strategyqa.cache import AnswerCache
from sigma0.bench.strategyqa.items import Item, Split, load_both, load_items, world_items
from sigma0.bench.strategyqa.measure import FEW, Score, score
from sigma0.bench.strategyqa.models import Asked, concurrency_of, open_model
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE, Makings, labels_used
from sigma0.bench.strategyqa.runner import LevelRun, run_level
from sigma0.bench.strategyqa.table import draw, table
from sigma0.effort import SHARES
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers

WORLD = "world"
_LIBRARIES = ("sigma0-lm", "torch", "transformers")


def strategyqa(
    experiments: Annotated[
        list[str], typer.Option("-e", "--experiment", help="Levels, or all; may be repeated. L0 is what p-values need.")
    ],
    data: Annotated[
        str, typer.Option(help="Folder of train.json and dev.json, a dataset's hub id, or world: the micro-world.")
    ] = WORLD,
    split: Annotated[str, typer.Option(help="Items that are scored: dev or train.")] = "dev",
    n: Annotated[int | None, typer.Option("-n", "--n", min=1, help="The first items at most.")] = None,
    model: Annotated[str, typer.Option(help="Shipped name, folder, hub id, or a server's name for it.")] = "pocket",
    ladder: Annotated[str | None, typer.Option(help="Rungs in place of --model, the lowest first.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A server that speaks OpenAI's protocol.")] = None,
    effort: Annotated[str, typer.Option(help="minimal, low, medium or high.")] = "medium",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling, and of the micro-world's stories.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each answer at most.")] = MAX_TOKENS,
    concurrency: Annotated[int, typer.Option(min=1, help="Items at a time, and questions in a batch.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="How often an item is begun anew that got no answer.")] = 2,
    cache: Annotated[
        Path | None, typer.Option(help="Answers by model and prompt: resumes a run, and repeats it bit for bit.")
    ] = None,
    paragraphs: Annotated[
        Path | None, typer.Option(help="L2-rag: the published paragraph file; else facts of train are searched.")
    ] = None,
    demonstrations: Annotated[Path | None, typer.Option(help="L1-ptp: traces that `distill` wrote.")] = None,
    template: Annotated[Path | None, typer.Option(help="L2: steps that `distill` wrote.")] = None,
    route: Annotated[str, typer.Option(help="L4: rules, model or verdict.")] = "rules",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Accuracy against cost, as .svg or .png.")] = None,
    out: Annotated[Path, typer.Option(help="Ledger that the rows are appended to.")] = LEDGER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")] = False,
) -> None:
    """Accuracy, calls and tokens of levels of control, each beside L0 on the same items."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors():
        names = chosen(experiments)
        if effort not in SHARES:
            raise ValueError(f"no such effort: {effort!r}; there are {', '.join(SHARES)}")
        if route not in get_args(Route):
            raise ValueError(f"no such route: {route!r}; there are {', '.join(get_args(Route))}")
        items, train, where = read_items(data, split, n, seed)
        asked = open_model(model, ladder, base_url, device, dtype, concurrency)
        if temperature > 0 and not asked.samples:
            raise ValueError(f"{asked.chat.name} hands up whole answers, which are greedy: temperature must be 0")
        settings = AskSettings(effort, max_new_tokens, temperature, seed)
        makings = Makings(train, paragraphs, None, demonstrations, template, cast(Route, route))
        kept = None if cache is None else AnswerCache(cache, {asked.chat.name: asked.identity})
        at_a_time = concurrency_of(asked.chat, concurrency)
        runs, labels = [], {}
        with progress_bar("items", len(names) * len(items), hidden=as_json) as advance:
            done = iter(range(1, len(names) * len(items) + 1))
            for name in names:
                level = EXPERIMENTS[name](makings)
                labels[name] = labels_used(level)
                found = run_level(
                    level, items, asked.chat, settings, kept, at_a_time, retries, lambda: advance(next(done))
                )
                runs.append(LevelRun(name, found.learns, found.answered))
        conditions = describe(asked, items, where, max_new_tokens, at_a_time)
        ended = datetime.now(timezone.utc).isoformat()
        rows = [to_row(each, conditions, settings, ended) for each in score(runs, labels)]
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


def read_items(data: str, split: str, n: int | None, seed: int) -> tuple[list[Item], list[Item], str]:
    """The items to be scored, those that levels may be seeded from, and where they are from.

    Raises:
        ValueError: For a split that there is not, or data that cannot be read.
    """
    if data == WORLD:
        wanted = 60 if n is None else n
        return world_items(wanted, "test", seed), world_items(200, "train", seed), f"micro-world, test, seed {seed}"
    if split not in get_args(Split):
        raise ValueError(f"no such split: {split!r}; there are {', '.join(get_args(Split))}")
    train, dev = load_both(data) if split == "dev" else (load_items(data, "train"), [])
    # levels are never seeded from what is scored
    items, seeds = (dev, train) if split == "dev" else (train, [])
    return items[:n], seeds, f"StrategyQA, {split}"


def describe(asked: Asked, items: Sequence[Item], where: str, max_new_tokens: int, batch_size: int) -> Conditions:
    """The conditions of a run; see `StrategyQARow` for an endpoint's."""
    model = asked.model
    known = [(item.qid, item.question, item.answer) for item in items]
    return Conditions(
        model=asked.chat.name,
        model_sha256=asked.identity,
        settings_sha256=asked.settings,
        total_loops=0 if model is None else getattr(model, "num_loops", 1),
        parameters=0 if model is None else sum(parameter.numel() for parameter in model.parameters()),
        device="endpoint" if model is None else device_name(model.device),
        dtype="not known" if model is None else str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        prompts=where,
        prompts_sha256=sha256(repr(known).encode()).hexdigest(),
        n=len(items),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        commit=git_commit(),
        versions={"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}},
    )


def to_row(found: Score, conditions: Conditions, settings: AskSettings, ended: str) -> StrategyQARow:
    """A level's row."""
    low, high = found.accuracy.interval
    return StrategyQARow(
        **conditions.model_dump(),
        time=ended,
        level=found.level,
        labels=found.labels,
        effort=settings.effort,
        temperature=settings.temperature,
        seed=settings.seed,
        accuracy=Figure(value=found.accuracy.value, low=low, high=high),
        majority=found.majority,
        misses=found.misses,
        difference=found.difference,
        p_value=found.p_value,
        p_holm=found.p_holm,
        calls=found.calls,
        prompt_tokens=found.usage.prompt_tokens,
        completion_tokens=found.usage.completion_tokens,
        seconds=found.usage.seconds,
        doors=found.doors,
    )


def closing(rows: Sequence[StrategyQARow], out: Path) -> str:
    """What stands under the table."""
    told = f"{len(rows)} rows in {out}; always the commoner label: {rows[0].majority:.1%}"
    if rows[0].n < FEW:
        told = f"With {rows[0].n} items, under {FEW}, differences of 10 points are noise.\n{told}"
    return told
