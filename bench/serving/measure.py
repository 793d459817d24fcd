"""Throughput and latency of a server under load, way by way; and rows and a table of them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console

from sigma0.bench.core.conditions import describe
from sigma0.bench.core.ledger import Conditions, Figure, ServeRow
from sigma0.bench.core.tables import BenchTable
from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.serving.load import WAYS, Ask, Load, closed_loop, open_loop
from sigma0.bench.serving.servers import counts, endless_copy, serving_process, transformers_server
from sigma0.calibrate.prompts import Prompt, encode_prompts
from sigma0.commands.console import progress_bar
from sigma0.config import ExitConfig
from sigma0.decode.runners import choose_runner
from sigma0.models.load import load

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Measured:
    """One way under one load in one round.

    Attributes:
        load: What the clients saw.
        counts: Passes and rows that it took; empty where the server does not tell.
    """

    load: Load
    counts: dict[str, float]


@dataclass(frozen=True)
class Way:
    """How a server is asked.

    Attributes:
        name: In tables and rows.
        exit_config: What requests ask for; None of a server that has none.
        url: Of the server.
        model: Its name there.
    """

    name: str
    exit_config: ExitConfig | None
    url: str
    model: str


@dataclass
class Bench:
    """Measurements by (load, way), one for each round.

    Attributes:
        prompts: Questions.
        max_tokens: Of every answer.
        found: In the order of the rounds.
    """

    prompts: list[str]
    max_tokens: int
    found: dict[tuple[str, float], dict[str, list[Measured]]] = field(default_factory=dict)

    def run(self, way: Way, kind: str, amount: float, requests: int) -> None:
        """One way under one load, once."""
        # answers go on past their end, where they may well run in circles
        own = {"on_collapse": "ignore"}
        extra = {} if way.exit_config is None else {"sigma0": {"exit": asdict(way.exit_config), **own}}
        ask = Ask(way.url, way.model, self.prompts, self.max_tokens, extra)
        before = counts(way.url) if way.exit_config is not None else {}
        driven = closed_loop(ask, int(amount), requests) if kind == "closed" else open_loop(ask, amount, requests)
        load = asyncio.run(driven)
        after = counts(way.url) if before else {}
        told = Measured(load, {name: after[name] - before[name] for name in before})
        self.found.setdefault((kind, amount), {}).setdefault(way.name, []).append(told)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        model: Shipped name, folder or hub id.
        loads: Kind (closed or open), and clients or requests a second.
        ways: Of ours, full first.
        requests: For each client, way and round.
        max_tokens: Of every answer.
        rounds: Interleaved.
        runner: Of our server: auto, eager or compile.
        compare: Whether `transformers serve` is asked too, where it starts.
    """

    model: str
    loads: tuple[tuple[str, float], ...]
    ways: tuple[str, ...]
    requests: int
    max_tokens: int
    rounds: int
    runner: str
    compare: bool

    def requests_under(self, kind: str, amount: float) -> int:
        """Requests of a round under a load."""
        return self.requests * (int(amount) if kind == "closed" else 16)


def measure_serving(plan: Plan, hidden: bool = False) -> list[ServeRow]:
    """Starts the servers, and asks each way under each load.

    Args:
        plan: What is measured.
        hidden: Whether no bar is shown.

    Raises:
        ValueError: For a way that there is not, or a server that does not start.
    """
    looped, tokenizer = load(plan.model, dtype="float32")
    runner = choose_runner(plan.runner, looped).name
    asked = [prompt for prompt in micro_world(64) if not isinstance(prompt.content, str)]
    prompts = [str(prompt.content[0]["content"]) for prompt in asked]  # type: ignore[index]
    with ExitStack() as stack:
        folder = stack.enter_context(endless_copy(plan.model))
        most = str(max(64, *(int(amount) for _, amount in plan.loads)))
        arguments = ["--dtype", "float32", "--threads", "1", "--max-running", "16", "--max-waiting", most]
        arguments += ["--runner", runner]
        _, url = stack.enter_context(serving_process(str(folder), arguments))
        asked_for = our_ways(looped.resolve_exit_config(None), url, folder.name, plan.ways)
        if plan.compare:
            asked_for += _theirs(stack, folder)
        bench = Bench(prompts, plan.max_tokens)
        # what is compiled at first use is compiled before it is measured
        compiles = runner == "compile"
        for kind, amount in plan.loads if compiles else (("closed", 1.0),):
            for way in asked_for if compiles else asked_for[:1]:
                bench.run(way, kind, amount, plan.requests_under(kind, amount) if compiles else 2)
        bench.found.clear()
        # there and back, so that none is always the first
        runs = [
            (way, kind, amount)
            for kind, amount in plan.loads
            for number in range(plan.rounds)
            for way in asked_for[:: 1 if number % 2 == 0 else -1]
        ]
        with progress_bar("runs", len(runs), hidden) as advance:
            for done, (way, kind, amount) in enumerate(runs, start=1):
                bench.run(way, kind, amount, plan.requests_under(kind, amount))
                advance(done)
    return rows_of(bench, asked_for, _conditions(looped, tokenizer, plan.model, asked, plan.max_tokens), runner)


def our_ways(own: ExitConfig, url: str, name: str, wanted: Sequence[str] = WAYS) -> list[Way]:
    """Full depth, its rule never met, and the three things that become of deeper loops.

    Raises:
        ValueError: For an unknown way, or where full depth, which the others are measured by, is not the first.
    """
    unknown = sorted(set(wanted) - set(WAYS))
    if unknown or wanted[0] != "full":
        raise ValueError(f"ways {','.join(wanted)!r} must begin with full and be some of {', '.join(WAYS)}")
    values = asdict(own)
    configs = {"full": ExitConfig(mode="full"), "never": ExitConfig(mode="qexit", q=1.0)}
    configs |= {after: ExitConfig(**{**values, "after_exit": after}) for after in ("finish", "drop", "verify")}
    return [Way(each, configs[each], url, name) for each in wanted]


def _theirs(stack: ExitStack, folder: Path) -> list[Way]:
    try:
        url = stack.enter_context(transformers_server(folder))
    except ValueError as error:
        typer.echo(f"transformers serve is left out: {error}", err=True)
        return []
    return [Way(TRANSFORMERS, None, url, str(folder))]


def _conditions(looped: Any, tokenizer: Any, model: str, asked: Sequence[Prompt], max_tokens: int) -> Conditions:
    ids = encode_prompts(looped, tokenizer, asked, max_tokens)
    where = "questions of pocket's world as chat, test split, seed 0"
    return describe(looped, model, where, ids, [None] * len(ids), max_tokens)


def rows_of(bench: Bench, ways: Sequence[Way], conditions: Conditions, runner: str = "eager") -> list[ServeRow]:
    """A row for each way and load, ratios taken round by round.

    Args:
        bench: What was measured.
        ways: How the servers were asked.
        conditions: Of the run.
        runner: Of our server.
    """
    started, rows = datetime.now(timezone.utc).isoformat(), []
    for (kind, amount), by_way in bench.found.items():
        full = by_way["full"]
        for way in ways:
            found = by_way[way.name]
            last = found[-1].load
            rows.append(
                ServeRow.model_validate(
                    {
                        **conditions.model_dump(),
                        "time": started,
                        "way": way.name,
                        "runner": "eager" if way.name == TRANSFORMERS else runner,
                        "exit_config": None if way.exit_config is None else way.exit_config.to_dict(),
                        "load": kind,
                        "amount": amount,
                        "requests": len(last.answers),
                        "rounds": len(found),
                        "failed": sum(each.load.failed for each in found),
                        "tokens_per_second": _figure(found, lambda each: each.load.tokens_per_second),
                        "rows_per_second": _told(found, "rows"),
                        "passes_per_second": _told(found, "passes"),
                        "speed_ratio": spread(
                            [
                                a.load.tokens_per_second / b.load.tokens_per_second
                                for a, b in zip(found, full, strict=True)
                            ]
                        ),
                        "first_token_ms": last.first_token,
                        "between_tokens_ms": last.between_tokens,
                    }
                )
            )
    return rows


def spread(values: Sequence[float]) -> Figure:
    """Median, least and greatest of the rounds."""
    return Figure(value=median(values), low=min(values), high=max(values))


def _figure(found: Sequence[Measured], value: Callable[[Measured], float]) -> Figure:
    return spread([value(each) for each in found])


def _told(found: Sequence[Measured], name: str) -> float | None:
    values = [each.counts[name] / each.load.seconds for each in found if name in each.counts]
    return median(values) if values else None


def print_serving(rows: Sequence[ServeRow]) -> None:
    """The rows as a table."""
    names = ("load", "way", "tokens/s", "of full", "rows/s", "passes/s", "first 50/99 %", "between 50/99 %", "failed")
    cells = [
        (
            f"{row.load} {row.amount:g}",
            row.way,
            f"{row.tokens_per_second.value:.0f}",
            f"{row.speed_ratio.value:.2f}",
            *("-" if rate is None else f"{rate:.0f}" for rate in (row.rows_per_second, row.passes_per_second)),
            f"{row.first_token_ms.p50:.0f} / {row.first_token_ms.p99:.0f}",
            f"{row.between_tokens_ms.p50:.1f} / {row.between_tokens_ms.p99:.1f}",
            str(row.failed),
        )
        for row in rows
    ]
    title = "median of the rounds; latencies of the last, ms"
    Console().print(BenchTable(names, cells, title, left=("load", "way")).rich())
