"""`python -m sigma0.bench all`: every report and row that the shipped weights give, made again."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated, Any

import typer

from sigma0.bench.core.conditions import Provenance, figures_of, git_commit, read_report, write_report
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.output import BenchTable
from sigma0.bench.rerun.recipes import Failed, Recipe, chosen, committed, differences
from sigma0.commands.console import one_line_errors, progress_bar

RESULTS = Path("bench/results")
# differences of one report that are printed
_SHOWN = 12


@dataclass(frozen=True)
class Rerun:
    """What one recipe gave."""

    name: str  # Of the recipe
    seconds: float  # That it took
    differences: tuple[str, ...]  # From what is committed, each told


def rerun_all(
    quick: Annotated[
        bool, typer.Option("--quick", help="A part of each, in half an hour; beside what the same part gave.")
    ] = False,
    only: Annotated[list[str], typer.Option(help="Some of the reports, by name.")] = [],  # noqa: B006
    file: Annotated[
        list[str], typer.Option("--input", help="NAME=FILE: what a report reads that the repository does not hold.")
    ] = [],  # noqa: B006
    write: Annotated[bool, typer.Option("--write", help="Write what was found, with its provenance.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out reports that say they were made by this very commit.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Reports made at once, each by one thread.")] = 2,
    results: Annotated[Path, typer.Option(help="Folder of the committed reports.")] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of a table.")] = False,
) -> None:
    """Make every deterministic figure again from the weights that ship; say which differ from what is committed.

    Reports that hold times of a machine, or read files or models that are not there, are left out unless named.
    """
    folder = results / "quick" if quick else results
    with one_line_errors():
        inputs = dict(_input(item) for item in file)
        asked = chosen(only)
        if not only:
            asked = [item for item in asked if not item.timed and item.is_ready and set(item.inputs) <= set(inputs)]
        if quick:
            asked = [item for item in asked if not item.timed]
        if resume:
            asked = [item for item in asked if not _is_made(folder / f"{item.name}.json")]
        if write:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(workers) as pool, progress_bar("reports", len(asked), as_json) as advance:
            waiting = [pool.submit(_one, item, quick, inputs, folder, results, write) for item in asked]
            try:
                for done, item in enumerate(as_completed(waiting), start=1):
                    item.result()
                    advance(done)
            finally:
                pool.shutdown(cancel_futures=True)
            reruns = [item.result() for item in waiting]
    different = [item for item in reruns if item.differences]
    if as_json:
        typer.echo(json.dumps({"reports": [asdict(item) for item in reruns], "different": len(different)}))
    else:
        _print(reruns, len(different))
    if any(item.differences[0].startswith("failed") for item in different) or (different and not write):
        raise typer.Exit(1)


def _one(recipe: Recipe, quick: bool, inputs: Mapping[str, Path], folder: Path, results: Path, write: bool) -> Rerun:
    started = monotonic()
    try:
        with TemporaryDirectory() as scratch:
            obtained = recipe.run(quick, inputs, Path(scratch))
    except Failed as error:
        # told with the others, which go on
        return Rerun(recipe.name, monotonic() - started, (f"failed: {error}",))
    seconds = monotonic() - started
    path = folder / f"{recipe.name}{recipe.ending}"
    before: Any = None
    if recipe.rows and not quick:
        before = committed(obtained, read_rows(results / "leaderboard.jsonl"))
    elif path.exists() and recipe.ending == ".json":
        before = figures_of(path)
    if write and not (recipe.rows and not quick):
        provenance = Provenance.here(recipe.told(quick), recipe.models, recipe.given(inputs))
        if recipe.ending == ".json":
            write_report(path, provenance, obtained)
        else:
            path.write_text(obtained)
            path.with_name(f"{recipe.name}.provenance.json").write_text(provenance.model_dump_json(indent=1) + "\n")
    told_of = ("was not committed before",) if before is None else tuple(differences(before, obtained))
    return Rerun(recipe.name, seconds, told_of)


def _is_made(path: Path) -> bool:
    return path.exists() and "provenance" in path.read_text()[:20] and read_report(path)[0].commit == git_commit()


def _input(named: str) -> tuple[str, Path]:
    name, parted, path = named.partition("=")
    if not parted or not Path(path).exists():
        raise ValueError(f"--input {named!r} is no NAME=FILE of a file that is there")
    return name, Path(path)


def _print(reruns: Sequence[Rerun], different: int) -> None:
    from rich.console import Console

    cells = [(item.name, f"{item.seconds:,.0f}", str(len(item.differences) or "none")) for item in reruns]
    console = Console()
    BenchTable(("report", "seconds", "differences"), cells).show()
    for item in reruns:
        for line in item.differences[:_SHOWN]:
            console.print(f"{item.name} {line}", highlight=False, markup=False, soft_wrap=True)
        if len(item.differences) > _SHOWN:
            console.print(f"{item.name}: and {len(item.differences) - _SHOWN} more")
    console.print(f"{len(reruns)} reports, {different} different")
