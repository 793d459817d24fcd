"""Reports of the verdict bench as Markdown, a line for each model."""

from collections.abc import Mapping

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.verdict.measure import VerdictReport
from sigma0.calibrate.bootstrap import Estimate


def switch_table(reports: Mapping[str, VerdictReport]) -> str:
    """Every setting of the switches, under a name for each report."""
    headings = ("model", "switches", "same text", "right", "passes_saved", "broken tokens", "escalated")
    lines = []
    for name, report in reports.items():
        for row in report.rows:
            shares = map(_percent, (row.same_text, row.right, row.passes_saved))
            lines.append([name, row.setting, *shares, f"{row.broken}", _percent(row.escalated)])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def door_table(reports: Mapping[str, VerdictReport]) -> str:
    """What the converge door lets through."""
    headings = (
        "model",
        "right of all",
        "opens for, of right answers",
        "right of those let through",
        "points more, 95 %",
    )
    lines = []
    for name, report in reports.items():
        right = next(row.right for row in report.rows if row.setting == "verdict")
        more = report.points_more
        points = "-" if more is None else f"{more.value:+.1f} ({more.interval[0]:+.1f} to {more.interval[1]:+.1f})"
        lines.append([name, *map(_percent, (right, report.opened_for_right, report.kept_right)), points])
    return BenchTable(headings, lines).markdown()


def separation_table(reports: Mapping[str, VerdictReport]) -> str:
    """How well each score tells wrong answers from right ones."""
    headings = ("model", "score", "AUROC", "AURC", "e-AURC", "AUGRC", "coverage at 5 % risk")
    lines = []
    for name, report in reports.items():
        for score, each in report.separations.items():
            auroc = "-" if each.auroc is None else f"{each.auroc:.3f}"
            areas = [f"{value:.4f}" for value in (each.aurc, each.excess_aurc, each.augrc)]
            lines.append([name, score, auroc, *areas, f"{100 * each.coverage:.1f} %"])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def _percent(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{100 * estimate.value:.1f} %"
