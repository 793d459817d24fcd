"""`python -m sigma0.bench strategyqa distill`: from what a higher level did right to a file that a lower one loads."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.console import Console

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AnswerTokens, AsJsonLines, LedgerFile
from sigma0.bench.core.output import tell_rows
from sigma0.bench.strategyqa import options
from sigma0.bench.strategyqa.asking import MAX_TOKENS, AskSettings
from sigma0.bench.strategyqa.command import closing
from sigma0.bench.strategyqa.distillation import (
    MOST,
    Rows,
    distil_demonstrations,
    distil_template,
    save,
)
from sigma0.bench.strategyqa.measure import to_rows
from sigma0.bench.strategyqa.opening import WORLD, Opening
from sigma0.bench.strategyqa.registry import EXPERIMENTS, Makings
from sigma0.bench.strategyqa.table import table
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Device, Dtype, ServedModel, Threads
from sigma0.config import Effort

# levels whose traces hold each step with its answer, and with L5 those that hold steps at all
ANSWERED = ("L2", "L2-rag", "L3", "L3-simple")
SOURCES = {"L1-ptp": ANSWERED, "L2": (*ANSWERED, "L5")}


def distill(
    source: Annotated[str, typer.Option("--from", help="L2, L2-rag, L3, L3-simple; for L2 also L5.")],
    target: Annotated[str, typer.Option("--to", help="L1-ptp: gets demonstrations. L2: gets a template of steps.")],
    file: Annotated[Path, typer.Option(help="Where what was distilled is written.")],
    seen: Annotated[int, typer.Option(min=1, help="Items of train that the higher level goes through.")] = 100,
    most: Annotated[int, typer.Option(min=1, help="Demonstrations at most.")] = MOST,
    data: options.DataOption = WORLD,
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
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Distil a higher level's right and audited traces, and measure the lower level with and without them on dev."""
    torch.set_num_threads(threads)
    with one_line_errors():
        check_path(source, target)
        settings = AskSettings(cast(Effort, effort), max_new_tokens, temperature, seed)
        opening = Opening(
            data=data, split="dev", n=n, model=model, ladder=ladder, base_url=base_url, device=device, dtype=dtype,
            concurrency=concurrency, retries=retries, settings=settings, cache=cache, threads=threads,
        )  # fmt: skip
        check_ledger(out)
        opened = opening.open()
        held_out, shown = opened.items, opened.train[:seen]
        # what the higher level searches are facts of other items than those that it answers
        makings = Makings(opened.train[seen:], paragraphs)
        total = len(shown) + 2 * len(held_out)
        with progress_bar("items", total, hidden=as_json) as advance:
            done = iter(range(1, total + 1))
            found = opened.run(EXPERIMENTS[source](makings), shown, lambda: advance(next(done)))
            rows = [(item, each.prediction) for item, each in zip(shown, found.answered, strict=True)]
            distilled = write(target, rows, file, most)
            runs = [
                opened.run(EXPERIMENTS[target](each), held_out, lambda: advance(next(done)))
                for each in (makings, distilled)
            ]
        runs[1] = replace(runs[1], variant=f"from {source}, {found.right} of {len(shown)} right")
        measured = to_rows(runs, opened, target)
        for row in measured:
            append_row(out, row)
    told = f"{closing(measured, out)}\n{source} was right on {found.right} of {len(shown)}; distilled to {file}"
    tell_rows(measured, as_json, lambda: Console().print(table(measured)), told)


def check_path(source: str, target: str) -> None:
    """Checks that there is a way from a level to another.

    Raises:
        ValueError: If there is none.
    """
    if target not in SOURCES:
        raise ValueError(f"nothing is distilled to {target!r}: to {' or '.join(SOURCES)}")
    if source not in SOURCES[target]:
        raise ValueError(f"nothing is distilled from {source!r} to {target}: from {', '.join(SOURCES[target])}")


def write(target: str, rows: Rows, file: Path, most: int) -> Makings:
    """Writes the file that a level is shown, and what the level is made with then.

    Raises:
        ValueError: If there is nothing to distil.
    """
    if target == "L1-ptp":
        save(distil_demonstrations(rows, most), file)
        return Makings(demonstrations=file)
    save(distil_template(rows), file)
    return Makings(template=file)
