"""`python -m sigma0.kernels`: every kernel compiled ahead of time, and what it uses."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sigma0.kernels.compiler import TARGETS, Compiled, compile_numbered
from sigma0.kernels.variants import variants

REQUIRED = ("sm_80", "sm_90", "sm_100")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    targets: Annotated[str, typer.Option(help="Some of these, comma-separated.")] = ",".join(TARGETS),
    kernel: Annotated[str, typer.Option(help="One of those in kernels/variants.py; all of them by default.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as a JSON list instead.")] = False,
) -> None:
    """Compile every kernel for every target; exit code 1 on a spill, too much shared memory or narrow loads."""
    wanted = targets.split(",")
    if unknown := set(wanted) - set(TARGETS):
        raise typer.BadParameter(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    numbers = [number for number, variant in enumerate(variants()) if kernel in ("", variant.kernel)]
    if not numbers:
        raise typer.BadParameter(f"no such kernel: {kernel}; kernels/variants.py names them")
    jobs = [(target, number) for target in wanted for number in numbers]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        rows = list(track(pool.map(compile_numbered, jobs), "compiling", len(jobs), console=Console(stderr=True)))
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=1))
    else:
        _print(rows)
    if any(row.fault for row in rows if row.target in REQUIRED):
        raise typer.Exit(1)


def _print(rows: list[Compiled]) -> None:
    table = Table()
    for name in ("kernel", "target", "dtype", "blocks", "registers", "spilled", "shared", "load", ""):
        table.add_column(name)
    for row in rows:
        numbers = (row.registers, row.spill_bytes, row.shared_bytes, row.load_width)
        cells = ["-" if number is None else str(number) for number in numbers]
        table.add_row(row.kernel, row.target, row.dtype, row.blocks, *cells, row.fault or "ok")
    console = Console()
    # in a file nothing is gained by eighty columns
    (console if console.is_terminal else Console(width=140)).print(table)


if __name__ == "__main__":
    app()
