"""`python -m sigma0.bench`: the benchmarks by name."""

import json
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from sigma0.bench.fidelity.command import fidelity
from sigma0.bench.report import report
from sigma0.bench.speed import SHAPES, SpeedReport, measure
from sigma0.extras import needs_extra
from sigma0.loading import load
from sigma0.rendering import one_line_errors, progress_bar, quiet_transformers
from sigma0.settings import ExitConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Benchmarks of sigma0."""


app.command()(fidelity)
app.command()(report)


@app.command()
def speed(
    model: Annotated[str, typer.Argument(help="Shipped name, folder or hub id; left out with --shape.")] = "",
    shape: Annotated[str, typer.Option(help=f"A random checkpoint instead: {', '.join(SHAPES)}.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    context: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="New tokens of each run.")] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds; medians are reported.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Decode time of full depth against finish and drop, interleaved in one run, batch 1, greedy, no EOS."""
    quiet_transformers()
    try:
        report = measure(model, shape, device, dtype, threads, context, new_tokens, repeats)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(asdict(report), indent=2)) if as_json else _print(report)


@app.command()
def gate(
    model: Annotated[str, typer.Argument(help="Shipped name, folder or hub id.")] = "pocket",
    exit_config: Annotated[str, typer.Option(help="Exit rule as JSON; by default the checkpoint's own.")] = "",
    n: Annotated[int, typer.Option("-n", "--n", help="Held-out stories, one question each.")] = 1000,
    rules_n: Annotated[int, typer.Option(help="The first of them, on which the exit rules are compared.")] = 200,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    seed: Annotated[int, typer.Option(help="Seed of the stories.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Exit depth beside difficulty and the oracles, and saturation as a sign of a wrong answer."""
    quiet_transformers()
    torch.set_num_threads(threads)
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.gate import measure_gate
        from sigma0.bench.gate_tables import print_gate

        config = ExitConfig.parse(json.loads(exit_config)) if exit_config else None
        looped, tokenizer = load(model, device=device, dtype=dtype)
        with progress_bar("questions", 2 * n + 4, hidden=as_json) as advance:
            report = measure_gate(looped, tokenizer, model, config, n, rules_n, split, seed, advance)
    typer.echo(json.dumps(asdict(report), indent=1)) if as_json else print_gate(report)


def _print(report: SpeedReport) -> None:
    title = f"{report.model}, {report.parameters / 1e6:.1f} M parameters, {report.dtype}, {report.device}"
    table = Table(title=title, title_justify="left")
    for name in ("run", "ms/token", "tokens/s", "passes/token", "full / this", "ideal", "GB/s of weights"):
        table.add_column(name, justify="right")
    for run in report.runs:
        table.add_row(
            run.name,
            f"{run.milliseconds_per_token:.2f}",
            f"{1000 / run.milliseconds_per_token:.1f}",
            f"{run.passes_per_token:.2f}",
            f"{run.speedup:.2f}",
            f"{run.ideal:.2f}",
            f"{run.bandwidth:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    app()
