"""`python -m sigma0.bench gpu`: a day on a GPU, part by part."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.ledger import check_ledger, read_rows
from sigma0.bench.gpu.parts import DAY, PART_SECONDS, REHEARSAL, Part, Sizes, named, parts
from sigma0.bench.gpu.running import Done, Outcome, last_line, run
from sigma0.bench.quantization.table import latest_quantization
from sigma0.bench.quantization.table import whole as quantization_table
from sigma0.bench.speed.table import speed_parts
from sigma0.commands.console import one_line_errors


def gpu(
    part: Annotated[str, typer.Option(help="Some of what --list names, parted by commas; by default all.")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the parts and what of them is done; run none.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Run what is done already too.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run all of it small, on a CPU.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; by default gpu-day, or gpu-rehearsal.")
    ] = None,
    tests: Annotated[Path, typer.Option(help="Folder of the tests, which is not in the wheel.")] = Path("tests"),
    seconds: Annotated[float, typer.Option(min=1, help="Time that a part may take.")] = PART_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each command that ran.")] = False,
) -> None:
    """Measure a GPU, in parts of at most eight minutes that each stand alone and go on where they were left."""
    sizes = REHEARSAL if rehearse else DAY
    folder = out or Path("gpu-rehearsal" if rehearse else "gpu-day")
    with one_line_errors():
        chosen = named(parts(sizes, folder, tests), part)
        folder.mkdir(parents=True, exist_ok=True)
        check_ledger(folder / "leaderboard.jsonl")
        done = Done(folder / "done.jsonl")
        if show:
            _list(chosen, done, seconds)
            return
        whole = True
        for each in chosen:
            why_not = _why_not(each, sizes)
            if why_not:
                typer.echo(f"{each.name}: {'left out' if rehearse else 'cannot run'}: {why_not}", err=True)
                whole = whole and rehearse
                continue
            for outcome in _run(each, done, folder, again, seconds):
                if as_json:
                    typer.echo(json.dumps(asdict(outcome)))
            whole = whole and all(done.has(each, command) for command in each.commands)
            _write_pages(folder)
    raise typer.Exit(0 if whole else 1)


def _why_not(part: Part, sizes: Sizes) -> str:
    """Why a part cannot run; "" where it can."""
    if sizes.device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device (--rehearse runs all of it small on a CPU)"
    if part.needs and find_spec(part.needs) is None:
        return f"{part.needs} is not installed: carry its wheel along, see bench/gpu/README.md"
    missing = [str(path) for path in part.files if not path.exists()]
    return f"there is no {', '.join(missing)}: carry the tests along (--tests)" if missing else ""


def _run(part: Part, done: Done, folder: Path, again: bool, seconds: float) -> Iterator[Outcome]:
    """Runs what of a part is to be run, as long as its time lasts."""
    wanted = [command for command in part.commands if again or not done.has(part, command)]
    total, skipped = len(part.commands), len(part.commands) - len(wanted)
    told = f", {skipped} done before" if skipped else ""
    typer.echo(f"{part.name}: {part.says}; {total} commands, at most {seconds:g} s{told}", err=True)
    end = time.monotonic() + seconds
    for number, command in enumerate(wanted, start=skipped + 1):
        left = end - time.monotonic()
        place = f"  [{number}/{total}] {command.name}"
        if left <= 0:
            typer.echo(f"{place}: no time is left; the same call goes on here", err=True)
            return
        typer.echo(f"{place}: {left:.0f} s left", err=True)
        outcome = run(part, command, folder / "logs", left)
        done.add(outcome)
        typer.echo(f"{place}: {_ended(outcome)}", err=True)
        yield outcome


def _ended(outcome: Outcome) -> str:
    """How a command ended, in words."""
    if outcome.rc == 0:
        return f"done in {outcome.seconds:.0f} s"
    how = "stopped at the limit" if outcome.rc is None else f"failed with exit code {outcome.rc}"
    return f"{how} after {outcome.seconds:.0f} s ({outcome.log}: {last_line(outcome.log)})"


def _write_pages(folder: Path) -> None:
    """Writes the tables of all rows so far beside them."""
    rows = read_rows(folder / "leaderboard.jsonl")
    pages = {
        "speed.md": ("Speed", speed_parts(rows)),
        "quantization.md": ("Quantised weights", [quantization_table(run) for run in latest_quantization(rows)]),
    }
    for name, (title, tables) in pages.items():
        if tables:
            (folder / name).write_text("\n\n".join([f"# {title}", *tables]) + "\n")


def _list(chosen: list[Part], done: Done, seconds: float) -> None:
    """What there is to run."""
    for part in chosen:
        ended = sum(done.has(part, command) for command in part.commands)
        typer.echo(f"{part.name}: {part.says}; {ended} of {len(part.commands)} done, at most {seconds:g} s a call")
