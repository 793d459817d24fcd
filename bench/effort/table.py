"""The policies in a table, for the terminal and for Markdown."""

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.effort.report import EffortReport
from sigma0.calibrate.bootstrap import Estimate

HEADINGS = ("policy", "right, accepted", "wrong, accepted", "wrong of accepted", "right in the end", "verifications")


def cells(report: EffortReport) -> list[tuple[str, ...]]:
    """A row for each policy."""
    return [
        (
            each.policy,
            _share(each.accepted_right),
            _share(each.accepted_wrong),
            "-" if each.wrong_of_accepted is None else _share(each.wrong_of_accepted),
            _share(each.right),
            _number(each.verifications),
            _number(each.cost),
        )
        for each in report.policies
    ]


def table(report: EffortReport) -> BenchTable:
    """The table for a terminal or a page of results."""
    return BenchTable((*HEADINGS, report.unit), cells(report), title(report))


def title(report: EffortReport) -> str:
    """What the figures are."""
    if report.kind == "simulation":
        return "SIMULATED with stated odds, not measured"
    return f"measured: {report.settings['solver']} verified by {report.settings['verifier']}"


def _share(value: Estimate) -> str:
    low, high = value.interval
    return f"{100 * value.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _number(value: Estimate) -> str:
    low, high = value.interval
    return f"{value.value:.1f} ({low:.1f} to {high:.1f})"
