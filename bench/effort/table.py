"""The policies in a table, for the terminal and for Markdown."""

from sigma0.bench.core.output import BenchTable
from sigma0.bench.effort.report import EffortReport
from sigma0.calibrate.bootstrap import Estimate

HEADINGS = ("policy", "right, accepted", "wrong, accepted", "wrong of accepted", "right in the end", "verifications")


def table(report: EffortReport) -> BenchTable:
    """A row for each policy, for a terminal or a page of results."""
    cells = [
        (
            item.policy,
            *("-" if share is None else _told(share, 100, " %") for share in
              (item.accepted_right, item.accepted_wrong, item.wrong_of_accepted, item.right)),
            _told(item.verifications),
            _told(item.cost),
        )
        for item in report.policies
    ]  # fmt: skip
    return BenchTable((*HEADINGS, report.unit), cells, title(report))


def title(report: EffortReport) -> str:
    """What the figures are."""
    if report.kind == "simulation":
        return "SIMULATED with stated odds, not measured"
    return f"measured: {report.settings['solver']} verified by {report.settings['verifier']}"


def _told(result: Estimate, times: int = 1, unit: str = "") -> str:
    low, high = result.interval
    return f"{times * result.value:.1f}{unit} ({times * low:.1f} to {times * high:.1f})"
