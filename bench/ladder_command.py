"""`python -m sigma0.bench ladder`: accuracy against cost, in a table, a picture and the ledger."""

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sigma0.bench.conditions import describe, weights_sha256
from sigma0.bench.ladder_picture import draw_ladder
from sigma0.bench.ladders import LARGE, LONGEST_ANSWER, Point, at_cost, cheapest, measure, settings_of
from sigma0.bench.ledger import LEDGER, Figure, LadderRow, append_row
from sigma0.bench.pocket.prompts import micro_world
from sigma0.estimates import Estimate
from sigma0.ladder import Rung
from sigma0.ladder.triggers import trigger_to_dict
from sigma0.loading import load
from sigma0.prompts import encode_prompts
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers
from sigma0.settings import ExitConfig


def ladder(
    small: Annotated[str, typer.Argument(help="The lower model: shipped name, folder or hub id.")] = "pocket",
    large: Annotated[str, typer.Argument(help="The larger one, with the same tokenizer.")] = "pocket-large",
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out stories, one question each.")] = 200,
    everything: Annotated[bool, typer.Option("--all", help="All questions, not only the hard half.")] = False,
    q: Annotated[float | None, typer.Option(help="Exit threshold of the lower model; by default its own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the stories.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the curves, as .svg or .png.")] = None,
    out: Annotated[Path, typer.Option(help="Ledger that the rows are appended to.")] = LEDGER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")] = False,
) -> None:
    """Accuracy against cost of handing tokens up, beside both models alone, chance, and entropy alone."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors():
        config = None if q is None else ExitConfig(q=q)
        models = [load(name, dtype="float32") for name in (small, large)]
        rungs = [
            Rung.local(*models[0], Path(small).name, config),
            Rung.local(*models[1], Path(large).name),
        ]
        prompts = list(micro_world(n, "test", seed, hard=not everything))
        points = settings_of()
        started = datetime.now(timezone.utc).isoformat()
        total = n * (1 + len(points))
        with progress_bar("answers", total, hidden=as_json) as advance:
            done = iter(range(1, total + 1))
            found = measure(rungs[0], rungs[1], prompts, points, lambda: advance(next(done)))
        where = f"pocket, test split, {'all' if everything else 'hard half'}, seed {seed}"
        ids = encode_prompts(*models[0], prompts, LONGEST_ANSWER)
        conditions = describe(models[0][0], small, where, ids, [each.answer for each in prompts], LONGEST_ANSWER)
        exits = models[0][0].resolve_exit_config(config).to_dict()
        rows = [_row(point, conditions, started, large, exits) for point in found]
        for row in rows:
            append_row(out, row)
        if picture is not None:
            draw_ladder(found, picture, f"{Path(small).name} to {Path(large).name}: {where}, n = {n}")
    if as_json:
        for row in rows:
            typer.echo(row.model_dump_json())
    else:
        print_points(found)
        typer.echo(f"{len(rows)} rows in {out}")


def _row(point: Point, conditions: Any, started: str, large: str, exits: dict[str, Any]) -> LadderRow:
    return LadderRow.model_validate(
        {
            **conditions.model_dump(),
            "time": started,
            "above": large,
            "above_sha256": weights_sha256(large),
            "exit_config": exits,
            "family": point.setting.family,
            "policy": trigger_to_dict(point.setting.policy),
            "stay": point.setting.stay,
            "unit": point.setting.unit,
            "warm_start": point.setting.warm_start,
            "accuracy": _figure(point.accuracy),
            "cost": _figure(point.cost),
            "seconds": _figure(point.seconds),
            "row_cost": point.rows,
            "handed_up": point.handed_up,
            "catch_ups": point.catch_ups,
        }
    )


def _figure(estimate: Estimate) -> dict[str, float]:
    figure = Figure.of(estimate)
    assert figure is not None
    return figure.model_dump()


def print_points(points: Sequence[Point]) -> None:
    """The points as a table, and the cheapest of each curve that keeps 95 % of the larger model's accuracy."""
    console = Console()
    table = Table(title="cost and time: of the larger model's alone")
    for name in ("setting", "right", "95 %", "cost", "time", "handed up", "catch-ups"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for point in points:
        low, high = point.accuracy.interval
        table.add_row(
            name_of(point),
            f"{point.accuracy.value:.1%}",
            f"{low:.1%}-{high:.1%}",
            f"{point.cost.value:.1%}",
            f"{point.seconds.value:.1%}",
            f"{point.handed_up:.1%}",
            f"{point.catch_ups:.2f}",
        )
    console.print(table)
    above = next(point for point in points if point.setting.family == LARGE)
    curves = {name: [point for point in points if point.setting.family == name] for name in families(points)}
    for name, curve in curves.items():
        best = cheapest(curve, 0.95, above)
        if best is None:
            console.print(f"{name}: no setting keeps 95 % of the larger model's accuracy")
            continue
        others = {other: at_cost(rest, best.cost.value) for other, rest in curves.items() if other != name}
        beside = ", ".join(f"{other} {value:.1%}" for other, value in others.items() if value is not None)
        console.print(f"{name}: {best.accuracy.value:.1%} right at {best.cost.value:.1%} of the cost; there {beside}")


def families(points: Sequence[Point]) -> list[str]:
    """The curves, each once."""
    return list(dict.fromkeys(point.setting.family for point in points if "only" not in point.setting.family))


def name_of(point: Point) -> str:
    """A setting in a few words."""
    told = trigger_to_dict(point.setting.policy)
    values = told["triggers"][-1] if "triggers" in told else told
    shown = ", ".join(f"{value:g}" for name, value in values.items() if name in ("above", "below", "rate"))
    return f"{point.setting.family} ({shown})" if shown else point.setting.family
