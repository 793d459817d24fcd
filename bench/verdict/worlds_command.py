"""`python -m sigma0.bench worlds`: calibrations of a risk where the truth is known."""

from typing import Annotated

import typer

from sigma0.bench.core.conditions import git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import tell_report
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson
from sigma0.errors import needs_extra


def worlds(
    sets: Annotated[int, typer.Option(min=1, help="Sets of answers drawn in each world.")] = 1000,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate a risk in simulated worlds: how often it is kept, and how often a door is found, beside an oracle."""
    with one_line_errors(), needs_extra("bench"):
        from sigma0.bench.verdict.tables import worlds_table
        from sigma0.bench.verdict.worlds import WORLDS, measure, report_worlds

        with progress_bar("calibrations", sets * len(WORLDS), hidden=as_json) as advance:
            rows = measure(WORLDS, sets, advance)
        if tell_report(report_worlds(rows, sets, git_commit()), out, as_json):
            typer.echo(worlds_table(rows))
