"""Reports of the verdict bench as Markdown, a line for each model."""

from collections.abc import Mapping, Sequence

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.verdict.measure import VerdictReport
from sigma0.bench.verdict.promise import PromiseReport
from sigma0.bench.verdict.shifts import not_kept
from sigma0.bench.verdict.strange import ALL
from sigma0.bench.verdict.worlds import WorldRow
from sigma0.calibrate.bootstrap import Estimate

Reports = Mapping[str, VerdictReport]


def report_tables(reports: Reports) -> list[str]:
    """Every table but that of the features, with what it is of."""
    return [
        "What the door `converge` lets through:",
        door_table(reports),
        "How well each score tells wrong answers from right ones:",
        separation_table(reports),
        "What the switches change:",
        switch_table(reports),
        "The same door under shifts:",
        shift_table(reports),
        "Strange prompts:",
        strange_table(reports),
    ]


def door_table(reports: Reports) -> str:
    """What the converge door lets through under either rule."""
    headings = (
        "model",
        "rule",
        "answers",
        "right of all",
        "opens for, of all",
        "of right answers",
        "right of those let through",
        "points more, 95 %",
        "calibration error",
    )
    lines = []
    for name, report in reports.items():
        for rule, row in report.rules.items():
            door = row.door
            shares = (door.right, door.opened, door.opened_of_right)
            cells = [*map(_percent, shares), _interval(door.right_of_opened), _points(row.points_more)]
            lines.append([name, rule, f"{door.prompts:,}", *cells, f"{100 * door.calibration_error:.1f} %"])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def separation_table(reports: Reports) -> str:
    """How well each score tells wrong answers from right ones."""
    headings = ("model", "score", "AUROC, 95 %", "AURC", "e-AURC", "AUGRC", "coverage at 5 % risk")
    lines = []
    for name, report in reports.items():
        for score, each in report.separations.items():
            areas = [f"{value:.4f}" for value in (each.aurc, each.excess_aurc, each.augrc)]
            lines.append([name, score, _area(each.auroc), *areas, f"{100 * each.coverage:.1f} %"])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def more_sentence(reports: Reports) -> str:
    """What the confidence ranks better than mean entropy."""
    told = [
        f"{name} {more.value:+.4f} ({more.interval[0]:+.4f} to {more.interval[1]:+.4f})"
        for name, more in ((name, report.auroc_more) for name, report in reports.items()) if more is not None
    ]  # fmt: skip
    return f"AUROC of the confidence less that of mean entropy, on the same answers: {', '.join(told) or '-'}."


def feature_table(reports: Reports) -> str:
    """The features that a confidence reads, and the best of those that it does not."""
    headings = ("model", "feature", "weight", "AUROC alone", "AUROC lost if shuffled")
    lines = []
    for name, report in reports.items():
        weights = report.weights or {}
        known = [use for use in report.features if use.auroc is not None]
        others = sorted((use for use in known if not use.stored), key=lambda use: -(use.auroc or 0.0))
        told = sorted((use for use in known if use.stored), key=lambda use: -(use.drop.value if use.drop else 0.0))
        for use in [*told, *others[:3]]:
            weight = f"{weights[use.name]:.3f}" if use.stored else "not read"
            lines.append([name, f"`{use.name}`", weight, f"{use.auroc:.3f}", _area(use.drop, 4)])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def switch_table(reports: Reports) -> str:
    """Every setting of the switches, under a name for each report."""
    headings = ("model", "switches", "answers", "same text", "right", "passes_saved", "broken tokens", "escalated")
    lines = []
    for name, report in reports.items():
        for row in report.switches:
            shares = map(_percent, (row.same_text, row.right, row.passes_saved))
            lines.append([name, row.setting, f"{row.answers}", *shares, f"{row.broken}", _percent(row.escalated)])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def shift_table(reports: Reports) -> str:
    """The door where questions or decoding are not those of the calibration."""
    headings = (
        "model",
        "shift",
        "answers",
        "right of all",
        "opened",
        "right of those, 95 %",
        "risk kept",
        "AUROC",
        "out of calibration",
    )
    lines = []
    for name, report in reports.items():
        for row in report.shifts:
            door = row.door
            cells = [
                _percent(door.right),
                _percent(door.opened),
                _interval(door.right_of_opened),
                row.kept(report.allowed),
            ]
            auroc = "-" if door.auroc is None else f"{door.auroc:.3f}"
            lines.append([name, row.shift, f"{door.prompts:,}", *cells, auroc, _percent(row.strange)])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def kept_sentence(reports: Reports) -> str:
    """Under which shifts the stated risk is not kept."""
    told = [f"{name}: {', '.join(broken)}" for name, broken in _broken(reports).items() if broken]
    if not told:
        return "Under none of these shifts do the answers let through show a risk above the stated one."
    return f"**The stated risk is not kept** under: {'; '.join(told)}."


def strange_table(reports: Reports) -> str:
    """How often the door stays shut for prompts that are not of the model's world."""
    headings = (
        "model",
        "prompts",
        "asked as",
        "number",
        "door stays shut, 95 %",
        "out of calibration",
        "by confidence alone",
    )
    lines = []
    for name, report in reports.items():
        for row in report.strange:
            kind = "all of them" if row.kind == ALL else row.kind
            lines.append(
                [
                    name,
                    kind,
                    row.form,
                    f"{row.prompts}",
                    _interval(row.shut),
                    _percent(row.strange),
                    _percent(row.doubted),
                ]
            )
    return BenchTable(headings, lines, left=headings[:3]).markdown()


def promise_table(reports: Mapping[str, PromiseReport]) -> str:
    """How often a chosen door keeps its risk."""
    headings = (
        "model",
        "door reads",
        "risk kept, 95 %",
        "of draws",
        "let through, of all",
        "of right answers",
        "mean risk",
        "without a door",
    )
    lines = []
    for name, report in reports.items():
        for row in report.rows:
            shares = (_interval(row.opened), _percent(row.opened_of_right), _percent(row.risk, 2))
            cells = (_interval(row.kept, 2), f"{report.draws}", *shares, f"{row.shut}")
            lines.append([name, row.score, *cells])
    return BenchTable(headings, lines, left=headings[:2]).markdown()


def worlds_table(rows: Sequence[WorldRow]) -> str:
    """Calibrations in simulated worlds: the promise kept, and the power."""
    headings = (
        "world",
        "fit + test",
        "risk allowed",
        "limit",
        "violated, 95 %",
        "door found, 95 %",
        "oracle",
        "several starts",
        "before",
        "let through",
        "several starts",
        "before",
        "may be",
    )
    lines = []
    for row in rows:
        promise = (f"{100 * row.risk:g} %", f"{100 * (1 - row.confidence):g} %", _interval(row.found.violated))
        power = (
            _interval(row.found.chose),
            f"{100 * row.oracle:.1f} %",
            _percent(row.several.chose),
            _percent(row.before.chose),
        )
        let_through = (row.found.opened, row.several.opened, row.before.opened, row.allowed)
        opened = (f"{100 * each:.1f} %" for each in let_through)
        lines.append([row.world, f"{row.found.fit:,} + {row.found.test:,}", *promise, *power, *opened])
    return BenchTable(headings, lines).markdown()


def _broken(reports: Reports) -> dict[str, Sequence[str]]:
    return {name: not_kept(report.shifts, report.allowed) for name, report in reports.items()}


def _percent(estimate: Estimate | None, digits: int = 1) -> str:
    return "-" if estimate is None else f"{100 * estimate.value:.{digits}f} %"


def _interval(estimate: Estimate | None, digits: int = 1) -> str:
    if estimate is None:
        return "-"
    low, high = (f"{100 * end:.{digits}f}" for end in estimate.interval)
    return f"{_percent(estimate, digits)} ({low} to {high})"


def _area(estimate: Estimate | None, digits: int = 3) -> str:
    if estimate is None:
        return "-"
    low, high = estimate.interval
    return f"{estimate.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _points(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:+.1f} ({estimate.interval[0]:+.1f} to {estimate.interval[1]:+.1f})"
