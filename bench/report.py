"""`python -m sigma0.bench report`: the ledger as tables and pictures."""

from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.options import LEDGER
from sigma0.bench.core.rows import DepthRow, FidelityRow
from sigma0.bench.fidelity.table import latest_runs, short_table, whole_table
from sigma0.bench.humaneval import table as humaneval
from sigma0.bench.simulation import table as simulation
from sigma0.bench.speed.table import speed_parts
from sigma0.bench.strategyqa import table as strategyqa
from sigma0.commands.console import one_line_errors
from sigma0.errors import needs_extra


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
        from sigma0.bench.figures.texts import changed

        if check:
            result = changed(Path())
            typer.echo("\n".join(f"{name}: not as generated" for name in result) or "every figure is the ledger's")
            raise typer.Exit(1 if result else 0)
        if not ledger.exists():
            raise ValueError(f"there is no ledger {str(ledger)!r}: python -m sigma0.bench fidelity writes one")
        folder = ledger.parent if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        pages = _reported(ledger, folder)
        if not pages:
            kinds = "fidelity, speed, humaneval, strategyqa or simulation"
            raise ValueError(f"the ledger {str(ledger)!r} holds no row of {kinds} yet")
        typer.echo(f"whole tables and pictures in {folder}", err=True)
        # the pages of the repository's own ledger say more
        if ledger != LEDGER or out is not None:
            for name, text in pages.items():
                (folder / f"{name}.md").write_text(text)
            return
        _draw_results(folder)
        other = changed(Path())
        for name, text in other.items():
            Path(name).write_text(text)
        typer.echo(f"texts with other figures than before: {', '.join(other) or 'none'}", err=True)


def _reported(ledger: Path, folder: Path) -> dict[str, str]:
    """The page of each kind of row that there is; prints their tables and draws their pictures."""
    from sigma0.bench.fidelity.plots import draw_depths, draw_trade_off
    from sigma0.bench.figures.pages import page

    rows, pages = read_rows(ledger), {}

    def pictures(name: str) -> list[Path]:
        return [folder / f"{name}.{kind}" for kind in ("png", "svg")]

    for name, run in latest_runs(rows).items():
        trade_off = [row for row in run if isinstance(row, FidelityRow)]
        pages[f"fidelity-{name}"] = whole_table(trade_off)
        draw_trade_off(trade_off, pictures(f"fidelity-{name}"))
        for row in run:
            if isinstance(row, DepthRow):
                draw_depths(row, pictures(f"depth-{name}"))
        typer.echo(short_table(trade_off) + "\n")
    solved, simulated = humaneval.latest_humaneval(rows), simulation.latest_simulation(rows)
    tables = {
        "Speed": speed_parts(rows),
        "HumanEval": [humaneval.markdown(solved)] if solved else [],
        "StrategyQA": [strategyqa.whole(run) for run in strategyqa.latest_levels(rows)],
    }
    for title, parts in tables.items():
        if parts:
            pages[title.lower()] = page(title, parts)
            typer.echo("\n\n".join(parts) + "\n")
    if simulated:
        pages["simulation"] = simulation.whole(simulated)
        simulation.draw_simulation(simulated, pictures("simulation"))
        typer.echo(pages["simulation"])
    return pages


def _draw_results(folder: Path) -> None:
    from sigma0.bench.figures.results import Results
    from sigma0.bench.kv.table import draw_kv, latest_kv
    from sigma0.bench.verdict.tables import draw_features

    results = Results(Path())
    stored = latest_kv(results.rows)
    if stored:
        draw_kv(stored, folder / "kv.svg")
    for name, output in results.verdicts.items():
        draw_features(output.features, results.features(name), folder / f"verdict-features-{name}.svg", name)
