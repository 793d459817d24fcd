"""The policies in a table, for the terminal and for Markdown."""

from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.effort.report import EffortReport

HEADINGS = ("policy", "right, accepted", "wrong, accepted", "wrong of accepted", "right in the end", "verifications")


def table(report: EffortReport) -> BenchTable:
    """A row for each policy, for a terminal or a page of results."""
    cells = [
        (
            item.policy,
            *map(with_interval, (item.accepted_right, item.accepted_wrong, item.wrong_of_accepted, item.right)),
            with_interval(item.verifications, times=1, unit=""),
            with_interval(item.cost, times=1, unit=""),
        )
        for item in report.policies
    ]
    return BenchTable((*HEADINGS, report.unit), cells, title(report))


def title(report: EffortReport) -> str:
    """What the figures are."""
    if report.kind == "simulation":
        return "SIMULATED with stated odds, not measured"
    return f"measured: {report.settings['solver']} verified by {report.settings['verifier']}"
