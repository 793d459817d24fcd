"""`python -m sigma0.bench report`: the ledger as tables and pictures."""

from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.options import LEDGER
from sigma0.bench.core.rows import DepthRow, FidelityRow, HumanEvalRow, SimulationRow, SpeedRow, StrategyQARow
from sigma0.bench.fidelity.pages import latest_runs, short_table, whole_table
from sigma0.bench.humaneval.table import latest_humaneval
from sigma0.bench.humaneval.table import markdown as humaneval_table
from sigma0.bench.simulation.table import latest_simulation
from sigma0.bench.simulation.table import whole as simulation_page
from sigma0.bench.speed.table import speed_parts
from sigma0.bench.strategyqa.table import latest_levels
from sigma0.bench.strategyqa.table import whole as strategyqa_table
from sigma0.commands.console import one_line_errors
from sigma0.errors import needs_extra

_REPORTED = FidelityRow | SpeedRow | HumanEvalRow | StrategyQARow | SimulationRow


def report(
    ledger: Annotated[Path, typer.Argument(help="The ledger.")] = LEDGER,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and pictures; by default beside the ledger.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="List the texts whose figures are not the ledger's.")] = False,
) -> None:
    """Write the whole tables and the pictures of the latest run of each model; print the short tables.

    With the repository's own ledger the generated parts of all its texts are written anew too.
    """
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.figures.pages import page
        from sigma0.bench.figures.texts import changed

        if check:
            found = changed(Path())
            typer.echo("\n".join(f"{name}: not as generated" for name in found) or "every figure is the ledger's")
            raise typer.Exit(1 if found else 0)
        from sigma0.bench.fidelity.plots import draw_depths, draw_trade_off

        if not ledger.exists():
            raise ValueError(f"there is no ledger {str(ledger)!r}: python -m sigma0.bench fidelity writes one")
        folder = ledger.parent if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        rows = read_rows(ledger)
        # the pages of the repository's own ledger say more, and come last
        own = ledger == LEDGER and out is None

        def write(name: str, text: str) -> None:
            if not own:
                (folder / name).write_text(text)

        if not any(isinstance(row, _REPORTED) for row in rows):
            kinds = "fidelity, speed, humaneval, strategyqa or simulation"
            raise ValueError(f"the ledger {str(ledger)!r} holds no row of {kinds} yet")
        for name, run in latest_runs(rows).items():
            trade_off = [row for row in run if isinstance(row, FidelityRow)]
            write(f"fidelity-{name}.md", whole_table(trade_off))
            draw_trade_off(trade_off, [folder / f"fidelity-{name}.{kind}" for kind in ("png", "svg")])
            for row in run:
                if isinstance(row, DepthRow):
                    draw_depths(row, [folder / f"depth-{name}.{kind}" for kind in ("png", "svg")])
            typer.echo(short_table(trade_off) + "\n")
        solved = latest_humaneval(rows)
        tables = {
            "speed": ("Speed", speed_parts(rows)),
            "humaneval": ("HumanEval", [humaneval_table(solved)] if solved else []),
            "strategyqa": ("StrategyQA", [strategyqa_table(run) for run in latest_levels(rows)]),
        }
        for name, (title, parts) in tables.items():
            if parts:
                write(f"{name}.md", page(title, parts))
                typer.echo("\n\n".join(parts) + "\n")
        if any(isinstance(row, SimulationRow) for row in rows):
            from sigma0.bench.simulation.picture import draw_simulation

            simulated = latest_simulation(rows)
            write("simulation.md", simulation_page(simulated))
            draw_simulation(simulated, [folder / f"simulation.{kind}" for kind in ("png", "svg")])
            typer.echo(simulation_page(simulated))
        typer.echo(f"whole tables and pictures in {folder}", err=True)
        if own:
            from sigma0.bench.figures.results import Results
            from sigma0.bench.kv.picture import draw_kv
            from sigma0.bench.kv.table import latest_kv
            from sigma0.bench.verdict.tables import draw_features

            results = Results(Path())
            stored = latest_kv(results.rows)
            if stored:
                draw_kv(stored, folder / "kv.svg")
            for name, told in results.verdicts.items():
                file = folder / f"verdict-features-{name}.svg"
                draw_features(told.features, results.features(name), file, name)
            other = changed(Path())
            for name, text in other.items():
                Path(name).write_text(text)
            typer.echo(f"texts with other figures than before: {', '.join(other) or 'none'}", err=True)
