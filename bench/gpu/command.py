"""`python -m sigma0.bench gpu`: many measurements of a GPU in one process, which is watched."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.gpu.parts import DAY, REHEARSAL, Outcomes, Part, named, parts
from sigma0.commands.console import one_line_errors

# Past the end a process that did not end by itself is ended.
_GRACE = 20.0
_WORKER = (sys.executable, "-m", "sigma0.bench.gpu.worker")


def gpu(
    minutes: Annotated[float, typer.Option(min=0.1, help="Time that this call may take.")] = 7.0,
    part: Annotated[str, typer.Option(help="Some of what --list names, separated by commas; by default all.")] = "",
    show: Annotated[bool, typer.Option("--list", help="List the parts and what of them is done; run none.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Run what is done already too.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run all of it small, on a CPU.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; by default gpu-day, or gpu-rehearsal.")
    ] = None,
) -> None:
    """Measure a GPU in one process, the most important first: what fits the time; the next call goes on from there."""
    until = time.time() + 60 * minutes
    folder = out or Path("gpu-rehearsal" if rehearse else "gpu-day")
    with one_line_errors():
        chosen = named(parts(REHEARSAL if rehearse else DAY, folder), part)
        outcomes = Outcomes(folder)
    if show:
        for item in chosen:
            output = "done" if outcomes.done(item) else f"{item.seconds:g} s"
            typer.echo(f"{item.name}: {item.says}; {output}")
        return
    missing = [item for item in chosen if item.needs and find_spec(item.needs) is None]
    for item in missing:
        typer.echo(f"{item.name}: left out: {item.needs} is not installed", err=True)
    wanted = [item for item in chosen if item not in missing and (again or not outcomes.done(item))]
    # what did not end well before may not do so again: the others first
    wanted.sort(key=lambda item: outcomes.tried(item) and not again)
    typer.echo(f"{len(wanted)} of {len(chosen)} parts to run in {minutes:g} minutes; results in {folder}", err=True)
    whole = run(wanted, folder, until)
    raise typer.Exit(0 if whole and (rehearse or not missing) else 1)


def run(wanted: list[Part], folder: Path, until: float, worker: tuple[str, ...] = _WORKER) -> bool:
    """Runs parts in one process, and those behind one that ended it in a new one; whether none failed.

    All is to be done by `until`, as `time.time()` tells it; `worker` is the command of that process.
    """
    outcomes, whole = Outcomes(folder), True
    while any(item.seconds <= until - time.time() for item in wanted):
        before = len(outcomes.lines())
        rc = _worked(worker, pickle.dumps((wanted, folder, until)), until)
        lines = outcomes.lines()[before:]
        if lines and lines[-1]["state"] == "began":
            (hung,) = (item for item in wanted if item.name == lines[-1]["part"])
            log = folder / "logs" / f"{hung.name}.txt"
            typer.echo(f"{hung.name}: stopped at its limit, or it ended the process (exit code {rc}): {log}", err=True)
            outcomes.add(hung, "stopped", why=str(log))
            whole = False
        whole = whole and all(line["state"] != "failed" for line in lines)
        if rc == 0 or not lines:
            return whole and rc == 0
        # what was left out for want of time stays so
        last = [item.name for item in wanted].index(lines[-1]["part"])
        wanted = wanted[last + 1 :]
    return whole


def _worked(worker: tuple[str, ...], asked: bytes, until: float) -> int:
    """Runs a worker to its end, or a little past the time, with all processes that it started; its exit code."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(worker, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        process.communicate(asked, timeout=max(until - time.time(), 0) + _GRACE)
    except subprocess.TimeoutExpired:
        typer.echo("the time is up", err=True)
    finally:
        # compilers that it started too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode
