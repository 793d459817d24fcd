"""`python -m sigma0.bench strategyqa`: levels of control on yes or no questions, and what one learns of another."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from sigma0.bench.core.ledger import append_rows, check_ledger
from sigma0.bench.core.options import OWN, AsJsonLines, LedgerFile, WorkerCount
from sigma0.bench.core.output import measuring, step_bar, tell_rows
from sigma0.bench.core.rows import StrategyQARow
from sigma0.bench.core.workers import keeping_pool
from sigma0.bench.strategyqa.distillation import MOST, distil_demonstrations, distil_template, save
from sigma0.bench.strategyqa.level import Level, LevelRun
from sigma0.bench.strategyqa.opening import Opened, Opening, pieces_of, run_pieces
from sigma0.bench.strategyqa.registry import EXPERIMENTS, ONCE, Makings, variant
from sigma0.bench.strategyqa.table import FEW, conditions_of, doors, draw, table, to_rows
from sigma0.commands.console import progress_bar
from sigma0.commands.options import grouped

# levels whose traces hold each step with its answer, and with L5 those that hold steps at all
ANSWERED = ("L2", "L2-rag", "L3", "L3-simple")
SOURCES = {"L1-ptp": ANSWERED, "L2": (*ANSWERED, "L5")}


class _LevelsByDefault(TyperGroup):
    """Takes options without a command's name for those of `levels`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name in where there is none."""
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named or not args else ["levels", *args])


strategyqa = typer.Typer(
    cls=_LevelsByDefault, no_args_is_help=True, help="Levels of control on yes or no questions, and distillation."
)


@strategyqa.command()
@grouped
def levels(
    experiments: Annotated[
        list[str], typer.Option("-e", "--experiment", help="Levels, or all; may be repeated. L0 is what p-values need.")
    ],
    opening: Opening,
    workers: WorkerCount = 1,
    picture: Annotated[Path | None, typer.Option(help="Accuracy against cost, as .svg or .png.")] = None,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Accuracy, calls and tokens of levels of control, each beside L0 on the same items.

    With several workers, those of a level that does not learn take items in turns, and one that learns is one worker's;
    a run that was cut off goes on where it stopped, once it is started again under the same conditions.
    """
    with measuring(opening.threads):
        names = chosen(experiments)
        if workers > 1 and opening.base_url is not None:
            raise ValueError("--workers have a model each, and --base-url has none here: raise --concurrency instead")
        check_ledger(out)
        opened = opening.open()
        made = [(name, EXPERIMENTS[name](opened.makings)) for name in names]
        if workers == 1:
            with step_bar("items", len(made) * len(opened.items), as_json) as advance:
                result = [opened.run(level, opened.items, advance) for _, level in made]
        else:
            result = _spread(opening, opened, made, workers, out, as_json)
        runs = [
            replace(run, level=name, variant=variant(name, opened.makings))
            for name, run in zip(names, result, strict=True)
        ]
        rows = to_rows(runs, opened)
        append_rows(out, rows)
        if picture is not None:
            draw(rows, picture)
    tell_rows(rows, as_json, lambda: Console().print(table(rows)), closing(rows, out))


@strategyqa.command()
@partial(grouped, left_out=("split", "demonstrations", "template", "route"))
def distill(
    source: Annotated[str, typer.Option("--from", help="L2, L2-rag, L3, L3-simple; for L2 also L5.")],
    target: Annotated[str, typer.Option("--to", help="L1-ptp: gets demonstrations. L2: gets a template of steps.")],
    file: Annotated[Path, typer.Option(help="Where what was distilled is written.")],
    seen: Annotated[int, typer.Option(min=1, help="Items of train that the higher level goes through.")] = 100,
    most: Annotated[int, typer.Option(min=1, help="Demonstrations at most.")] = MOST,
    *,
    opening: Opening,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Distil a higher level's right and audited traces, and measure the lower level with and without them on dev."""
    with measuring(opening.threads):
        if target not in SOURCES:
            raise ValueError(f"nothing is distilled to {target!r}: to {' or '.join(SOURCES)}")
        if source not in SOURCES[target]:
            raise ValueError(f"nothing is distilled from {source!r} to {target}: from {', '.join(SOURCES[target])}")
        check_ledger(out)
        opened = opening.open()
        held_out, shown = opened.items, opened.train[:seen]
        # what the higher level searches are facts of other items than those that it answers
        makings = Makings(opened.train[seen:], opening.paragraphs)
        with step_bar("items", len(shown) + 2 * len(held_out), as_json) as advance:
            result = opened.run(EXPERIMENTS[source](makings), shown, advance)
            rows = [(item, entry.prediction) for item, entry in zip(shown, result.answered, strict=True)]
            # what the lower level is made with then
            if target == "L1-ptp":
                save(distil_demonstrations(rows, most), file)
                distilled = Makings(demonstrations=file)
            else:
                save(distil_template(rows), file)
                distilled = Makings(template=file)
            runs = [opened.run(EXPERIMENTS[target](entry), held_out, advance) for entry in (makings, distilled)]
        runs[1] = replace(runs[1], variant=f"from {source}, {result.right} of {len(shown)} right")
        measured = to_rows(runs, opened, target)
        append_rows(out, measured)
    output = f"{closing(measured, out)}\n{source} was right on {result.right} of {len(shown)}; distilled to {file}"
    tell_rows(measured, as_json, lambda: Console().print(table(measured)), output)


def _spread(
    opening: Opening, opened: Opened, made: Sequence[tuple[str, Level]], workers: int, out: Path, hidden: bool
) -> list[LevelRun]:
    """Runs levels by workers, with a file beside the ledger in which their results are kept until all are there."""
    model = opened.asked.model
    path = out.with_name(f".{out.stem}-{conditions_of(opened).run}.work.jsonl")
    gpus = int(model is not None and model.device.type == "cuda")
    with keeping_pool(path, "parts", workers, opening.threads, gpus) as (pool, kept):
        pieces = pieces_of(made, opening.resolved(), opened)
        with progress_bar("parts", len(pieces), hidden) as advance:
            return run_pieces(made, pieces, pool, kept, advance)


def chosen(experiments: Sequence[str]) -> tuple[str, ...]:
    """The levels that are named; all means each of them once."""
    if list(experiments) == ["all"]:
        return tuple(ONCE)
    unknown = [name for name in experiments if name not in EXPERIMENTS]
    if unknown:
        raise ValueError(f"no such level: {unknown[0]!r}; there are all, {', '.join(EXPERIMENTS)}")
    if len(set(experiments)) < len(experiments):
        raise ValueError(f"a level is named twice: {', '.join(experiments)}")
    return tuple(experiments)


def closing(rows: Sequence[StrategyQARow], out: Path) -> str:
    """What stands under the table."""
    output = f"{len(rows)} rows in {out}; always the commoner label: {rows[0].majority:.1%}"
    opened = [f"{row.level}: {doors(row)}" for row in rows if row.doors]
    if opened:
        output = f"Doors that the verdicts on answers opened: {'; '.join(opened)}\n{output}"
    if rows[0].n < FEW:
        output = f"With {rows[0].n} items, under {FEW}, differences of 10 points are noise.\n{output}"
    return output
