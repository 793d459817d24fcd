"""`python -m sigma0.bench mutants`: which small faults in the sources the fast tests notice."""

import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import LedgerFile
from sigma0.bench.core.rows_tests import MutationRow
from sigma0.bench.mutation.campaign import Area, Campaign, Judged, scores
from sigma0.bench.mutation.covering import CoverageCache
from sigma0.bench.mutation.mutants import sample
from sigma0.bench.mutation.reasons import Reasons, read_equivalents, survivors
from sigma0.bench.mutation.table import score_table
from sigma0.bench.mutation.workers import TestWorker, copy_tree
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson
from sigma0.errors import needs_extra

AREAS = {
    # the server runs the decoder in ways that a call does not
    "decode": Area(("sigma0/decode",), ("tests/decode", "tests/serve/engine", "tests/models")),
    **{name: Area((f"sigma0/{name}",), (f"tests/{name}",)) for name in ("calibrate", "signals", "ladder")},
    "scheduler": Area(("serve/engine/scheduler.py",), ("tests/serve/engine",)),
}
# What most tests import: the two that import most from elsewhere.
_SHARED = ("tests.conftest", "tests.serve.conftest")
_LIBRARIES = ("torch", "pytest", "hypothesis", "cosmic-ray", "coverage")
# Mutants of a folder at least, so that its own score means something.
_LEAST = 8
# Of tests, as they were timed before, for one mutant.
_MOST_SECONDS = 60.0


def mutants(
    n: Annotated[int, typer.Option("-n", min=1, help="Mutants.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="When the run ends; what was not reached is told.")] = 20.0,
    folder: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(AREAS)}; by default all.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with a copy of the tree.")] = 2,
    cache: Annotated[Path, typer.Option(help="Folder that keeps which tests run which lines.")] = Path(".mutants"),
    out: LedgerFile = OWN,
    as_json: AsJson = False,
) -> None:
    """Change the sources in small ways, one at a time, and see whether the fast tests notice.

    Run it at the root of the repository. Annotations, docstrings, `__all__`, what is raised, warnings, logging and
    blocks under TYPE_CHECKING are no logic and stay as they are. Sources are changed in copies of the tree only. Of the
    fast tests those run that run the changed line, the nearest first, up to the first that fails; a mutant whose tests
    run out of their time counts as killed, one whose line no fast test runs as survived.
    """
    with one_line_errors(), needs_extra("test"):
        begun = time.monotonic()
        end = begun + 60 * minutes
        root = Path.cwd()
        areas = {name: AREAS[name] for name in _known(folder)}
        check_ledger(out)
        commit = git_commit()
        os.environ["OMP_NUM_THREADS"] = "1"
        with ExitStack() as stack:
            folder_of_copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
            # the tree may be worked on meanwhile: one copy stays as it was
            tree, *made = copy_tree(root, folder_of_copies, 1 + workers)
            drawn = sample(tree, {name: _sources(tree, area) for name, area in areas.items()}, n, seed, _LEAST)
            started = [stack.enter_context(TestWorker(copy, _SHARED)) for copy in made]
            known = CoverageCache(cache, tree)
            campaign = Campaign(started, tree, areas, known, _MOST_SECONDS, end, begun + 60 * minutes / 2)
            stale = campaign.stale
            with progress_bar("test files", len(stale), hidden=as_json) as advance:
                unknown = campaign.cover(stale, advance)
            with progress_bar("mutants", sum(map(len, drawn.values())), hidden=as_json) as advance:
                judged = campaign.judge(drawn, advance)
        reasons = Reasons(read_equivalents())
        row = MutationRow(
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            commit=commit,
            device=device_name(torch.device("cpu")),
            versions={"python": platform.python_version(), **{each: version(each) for each in _LIBRARIES}},
            seed=seed,
            n=n,
            minutes=minutes,
            most_seconds=_MOST_SECONDS,
            folders=scores(judged, reasons.of),
            survivors=survivors(judged, reasons),
        )
        append_row(out, row)
    if as_json:
        typer.echo(
            json.dumps({"row": row.model_dump(), "unknown": unknown, "mutants": [_told(each) for each in judged]})
        )
        return
    _print(row, judged, unknown)
    typer.echo(f"1 row in {out}")


def _known(folder: list[str] | None) -> list[str]:
    for name in folder or ():
        if name not in AREAS:
            raise ValueError(f"there is no folder {name!r} to mutate: {', '.join(AREAS)}")
    return list(folder or AREAS)


def _sources(root: Path, area: Area) -> list[str]:
    paths = [root / source for source in area.sources]
    if not all(path.exists() for path in paths):
        raise ValueError(f"{str(root)!r} is not the root of the repository: it has no {area.sources[0]}")
    found = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    return [str(file.relative_to(root)) for file in found]


def _told(each: Judged) -> dict[str, object]:
    mutant = each.mutant
    return {
        "folder": each.folder, "file": mutant.file, "line": mutant.line, "operator": mutant.operator,
        "outcome": each.outcome, "tests": each.tests, "seconds": round(each.seconds, 1), "by": each.by,
        "before": mutant.before, "after": mutant.after, "diff": mutant.diff,
    }  # fmt: skip


def _print(row: MutationRow, judged: list[Judged], unknown: list[str]) -> None:
    console = Console(highlight=False)
    console.print(score_table(row).rich())
    reasons = {(each.file, each.before, each.after): each.reason for each in row.survivors}
    for each in judged:
        if each.outcome == "survived":
            reason = reasons[each.mutant.file, each.mutant.before, each.mutant.after]
            told = reason or ("not killed" if each.tests else "not run by any fast test")
            console.print(f"\n{told}\n{each.mutant.diff}", markup=False, soft_wrap=True)
    if unknown:
        console.print(
            f"\nthe time did not suffice to see what {len(unknown)} test files run: run it again", markup=False
        )
