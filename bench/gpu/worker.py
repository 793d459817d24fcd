"""The one process in which all measurements of `python -m sigma0.bench gpu` run: `python -m sigma0.bench.gpu.worker`.

Its standard input are the arguments of `work`, pickled. Each part has a limit, at which a thread of the interpreter's
own ends the process, whatever holds it up: where that was says the log.
"""

import faulthandler
import gc
import os
import pickle
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TextIO

import torch
import typer

from sigma0.bench.core.ledger import check_ledger, read_rows
from sigma0.bench.gpu.parts import Outcomes, Part
from sigma0.bench.quantization.measure import latest_quantization
from sigma0.bench.quantization.measure import whole as quantization_table
from sigma0.bench.speed.table import speed_parts
from sigma0.errors import one_line

# How much longer than expected a part may take before it counts as hung.
PATIENCE, _LEAST = 3.0, 30.0


def work(wanted: list[Part], folder: Path, until: float) -> None:
    """Measures part by part until a `time.time()`; one whose expected time no longer fits is left out."""
    outcomes = Outcomes(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(wanted, start=1):
        place, left = f"[{number}/{len(wanted)}] {part.name}", until - time.time()
        if part.seconds > left:
            say(f"{place}: {part.seconds:g} s do not fit into {max(left, 0):.0f} s; the same call goes on here")
            continue
        say(f"{place}: {part.says}; {part.seconds:g} s of {left:.0f} s")
        outcomes.add(part, "began")
        start = time.monotonic()
        with (folder / "logs" / f"{part.name}.txt").open("w") as log:
            faulthandler.dump_traceback_later(min(max(PATIENCE * part.seconds, _LEAST), left), exit=True, file=log)
            why = measure(part, log)
            faulthandler.cancel_dump_traceback_later()
        took = time.monotonic() - start
        outcomes.add(part, "failed" if why else "done", took, why)
        say(f"{place}: failed after {took:.0f} s: {why}" if why else f"{place}: done in {took:.0f} s")
        write_pages(folder)
        release()


def measure(part: Part, log: TextIO) -> str:
    """Runs a part; why it failed, or ""."""
    module, _, name = part.function.partition(":")
    try:
        with redirect_stdout(log), redirect_stderr(log):
            getattr(import_module(module), name)(**part.arguments)
    # whatever it is, it is told, and the others go on
    except Exception as error:
        traceback.print_exc(file=log)
        cause = error.__cause__ if isinstance(error, typer.Exit) and error.__cause__ else error
        return f"{type(cause).__name__}: {one_line(cause)}"
    return ""


def release() -> None:
    """Gives back what a part held; ends the process where the device no longer answers, which is for good."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch._dynamo.reset()
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        say(f"the device does not answer any more: {one_line(error)}")
        os._exit(1)


def write_pages(folder: Path) -> None:
    """Writes the tables of all rows so far beside them."""
    rows = read_rows(folder / "leaderboard.jsonl")
    pages = {
        "speed.md": ("Speed", speed_parts(rows)),
        "quantization.md": ("Quantised weights", [quantization_table(run) for run in latest_quantization(rows)]),
    }
    for name, (title, tables) in pages.items():
        if tables:
            (folder / name).write_text("\n\n".join([f"# {title}", *tables]) + "\n")


def say(line: str) -> None:
    """Prints a line on stderr at once."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    """Does what standard input asks for."""
    wanted, folder, until = pickle.load(sys.stdin.buffer)
    if "cuda" in {part.arguments.get("device") for part in wanted} and not torch.cuda.is_available():
        say("error: torch sees no CUDA device (--rehearse runs all of it small on a CPU)")
        sys.exit(2)
    check_ledger(folder / "leaderboard.jsonl")
    work(wanted, folder, until)


if __name__ == "__main__":
    main()
