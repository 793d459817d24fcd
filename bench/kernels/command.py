"""`python -m sigma0.bench kernels`: time the kernels, print and store."""

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import BenchTable, measuring, step_bar, tell_report
from sigma0.bench.kernels.measure import SHAPE, WAYS, measure, pass_seconds
from sigma0.bench.kernels.tune import products_of, write_table
from sigma0.bench.kernels.tune import tune as tuned
from sigma0.bench.speed.shapes import SHAPES
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, StatedDtype, Threads
from sigma0.kernels.row_product import TABLE
from sigma0.models.load import resolve_device


def kernels(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...; the kernels themselves need CUDA.")] = "auto",
    dtype: StatedDtype = "bfloat16",
    rows: Annotated[str, typer.Option(help="Rows of a pass, separated by commas.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Columns that a row attends to, separated by commas.")] = "512,4096",
    ways: Annotated[str, typer.Option(help=f"Some of {', '.join(WAYS)}; by default all, and eager off CUDA.")] = "",
    whole_pass: Annotated[bool, typer.Option(help="Time a pass of the block too, for the shares.")] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the best tiling of each product, and write the table (--out).")
    ] = False,
    shape: Annotated[str, typer.Option(help=f"Whose products --tune divides: {', '.join(SHAPES)}.")] = SHAPE,
    seconds: Annotated[float, typer.Option(min=1, help="Time that --tune may take.")] = 110,
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Microseconds and bandwidth of every kernel in Ouro-1.4B's shape, beside eager torch and torch.compile."""
    with measuring(threads):
        place = torch.device(resolve_device(device))
        if tune:
            _tune(shape, place, getattr(torch, dtype), seconds, out or TABLE, as_json)
            return
        names = tuple(ways.split(",")) if ways else WAYS if place.type == "cuda" else ("eager",)
        unknown = sorted(set(names) - set(WAYS))
        if unknown:
            raise ValueError(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
        if "kernel" in names and place.type != "cuda":
            raise ValueError(f"the kernels are timed on CUDA only, not on {place.type}: use --ways eager")
        kind = getattr(torch, dtype)
        counts, columns = _numbers(rows), _numbers(contexts)
        passes = {count: pass_seconds(place, kind, count) for count in counts} if whole_pass else {}
        with step_bar("cases", len(counts) * (8 + len(columns)), hidden=as_json) as advance:
            copy, timings = measure(place, kind, counts, columns, names, passes, advance)
    report = {
        "shape": SHAPE,
        "device": device_name(place),
        "dtype": dtype,
        "torch": torch.__version__,
        "commit": git_commit(),
        "copy_gigabytes_per_second": copy / 1e9,
        "pass_microseconds": {str(count): seconds * 1e6 for count, seconds in passes.items()},
        "timings": timings,
    }
    if tell_report(report, out, as_json):
        _print(report)


def _tune(shape: str, place: torch.device, dtype: torch.dtype, seconds: float, table: Path, as_json: bool) -> None:
    if place.type != "cuda":
        raise ValueError(f"products are tuned on CUDA only, not on {place.type}: --tune needs a GPU")
    with progress_bar("products", len(products_of(shape)), hidden=as_json) as advance:
        rows = tuned(shape, place, dtype, seconds, advance)
    write_table(table, rows)
    for row in rows:
        typer.echo(json.dumps(row))
    typer.echo(f"{len(rows)} rows in {table}", err=True)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"whole numbers from 1 on, separated by commas, not {text!r}")
    return tuple(int(part) for part in parts)


def _print(report: dict[str, Any]) -> None:
    copy = report["copy_gigabytes_per_second"]
    title = f"{report['shape']}, {report['dtype']}, {report['device']}; a copy moves {copy:.0f} GB/s"
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        **{name: itemgetter(name) for name in ("kernel", "size", "way")},
        "us": lambda timing: f"{timing['microseconds']:.1f}",
        "GB/s": lambda timing: f"{timing['gigabytes_per_second']:.0f}",
        "of a copy": lambda timing: f"{timing['of_a_copy']:.0%}",
        "of a pass": lambda timing: "" if timing["of_a_pass"] is None else f"{timing['of_a_pass']:.1%}",
    }
    BenchTable.of(columns, report["timings"], title, tuple(columns)[:3]).show()
