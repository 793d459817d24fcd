"""`python -m sigma0.bench mutants`: a sample of small faults in the sources, made and tested by cosmic-ray."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sigma0.commands.console import one_line_errors
from sigma0.errors import needs_extra

AREAS = ("decode", "calibrate", "signals", "ladder", "scheduler")
_AREA = typer.Option("--area", "--folder", help=f"{', '.join(AREAS)} (by default all), or cosmic-ray's own TOML file.")


def mutants(
    n: Annotated[int, typer.Option("-n", "--count", min=1, help="Mutants of each area.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    area: Annotated[list[str] | None, _AREA] = None,
) -> None:
    """Change the sources in small ways, one at a time, and see whether the fast tests notice.

    The last commit is cloned to .mutants/tree and changed there; `cr-report .mutants/AREA.sqlite` tells more.
    """
    with one_line_errors(), needs_extra("ci"):
        from cosmic_ray.work_db import use_db

        tree = Path(".mutants/tree")
        shutil.rmtree(tree, ignore_errors=True)
        _run(Path(), "git", "clone", "--quiet", ".", str(tree))
        for built in Path().glob("kernels/cpu/*.so"):
            shutil.copy(built, tree / built)  # git does not hold it
        typer.echo(f"{'area':12}{'drawn':>6}{'killed':>8}{'survived':>10}")
        for name in area or AREAS:
            config = Path(__file__).with_name(f"{name}.toml") if name in AREAS else Path(name).resolve()
            session = Path(".mutants", f"{config.stem}.sqlite").resolve()
            _run(tree, "cosmic-ray", "baseline", str(config))
            _run(tree, "cosmic-ray", "init", "--force", str(config), str(session))
            _run(tree, "cr-filter-operators", str(session), str(Path(__file__).with_name("operators.toml")))
            with use_db(session) as work:
                items = sorted(work.pending_work_items, key=lambda item: str(item.mutations))
                drawn = random.Random(seed).sample(items, min(n, len(items)))
                work.clear()
                work.add_work_items(drawn)
                _run(tree, "cosmic-ray", "exec", str(config), str(session))
                survived = [item.mutations[0] for item, result in work.completed_work_items if not result.is_killed]
            typer.echo(f"{config.stem:12}{len(drawn):6}{len(drawn) - len(survived):8}{len(survived):10}")
            for entry in sorted(survived, key=str):
                typer.echo(f"  {entry.module_path}:{entry.start_pos[0]} {entry.operator_name}")


def _run(cwd: Path, *command: str) -> None:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"{' '.join(command)} failed: {(ended.stdout + ended.stderr)[-500:]}")
