"""`python -m sigma0.bench grounding`: falsified facts against untouched ones."""

from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.core.options import ReportFile
from sigma0.bench.core.output import BenchTable, tell_report
from sigma0.bench.grounding.measure import cases, measure, read_facts
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson


def grounding(
    facts: Annotated[Path, typer.Argument(help="A StrategyQA file: a JSON list of items with facts.")],
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Recall and precision of unanchored claims: a number altered or a name swapped, against untouched facts."""
    with one_line_errors():
        made = cases(read_facts(facts))
        with progress_bar("facts", len(made), hidden=as_json) as advance:
            result = measure(made, advance)
    report = {
        "file": facts.name,
        "sha256": sha256(facts.read_bytes()).hexdigest(),
        "cases": len(made),
        "detections": result,
    }
    if not tell_report(report, out, as_json):
        return
    headings = ("falsified", "facts", "found", "recall", "untouched", "false alarms", "precision")
    cells = []
    for item in result:
        shown = {**item, "recall": f"{item['recall']:.1%}", "precision": f"{item['precision']:.1%}"}
        columns = ("kind", "falsified", "found", "recall", "untouched", "false_alarms", "precision")
        cells.append([str(shown[column]) for column in columns])
    BenchTable(headings, cells, f"facts of {facts.name}").show()
