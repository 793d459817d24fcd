"""Reports of the verdict bench as Markdown, a line for each model, and a picture of the features."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sigma0.bench.core.output import BenchTable, drawing, percent, with_interval
from sigma0.bench.verdict.measure import ALL, VerdictReport
from sigma0.bench.verdict.promise import PromiseReport
from sigma0.bench.verdict.scores import FeatureUse
from sigma0.bench.verdict.worlds import WorldRow
from sigma0.calibrate.bootstrap import Estimate
from sigma0.calibrate.confidence import FeatureFigure

Reports = Mapping[str, VerdictReport]


def report_tables(reports: Reports) -> list[str]:
    """Every table but that of the features, with what it is of."""
    tables = {
        "What the door `converge` lets through:": door_table,
        "How well each score tells wrong answers from right ones:": separation_table,
        "What the switches change:": switch_table,
        "The same door under shifts:": shift_table,
        "Strange prompts:": strange_table,
    }
    return [part for title, table in tables.items() for part in (title, table(reports))]


def _table(headings: str, lines: Iterable[Sequence[str]], left: int = 2) -> str:
    return BenchTable.under(headings, lines, left).markdown()


def door_table(reports: Reports) -> str:
    """What the converge door lets through under either rule."""
    lines = []
    for name, rule, row in ((name, *item) for name, report in reports.items() for item in report.rules.items()):
        door = row.door
        shares = [percent(share) for share in (door.right, door.opened, door.opened_of_right)]
        cells = [*shares, with_interval(door.right_of_opened), _area(row.points_more, 1, "+")]
        lines.append([name, rule, f"{door.prompts:,}", *cells, f"{100 * door.calibration_error:.1f} %"])
    return _table(
        "model | rule | answers | right of all | opens for, of all | of right answers | right of those let through | "
        "points more, 95 % | calibration error",
        lines,
    )


def separation_table(reports: Reports) -> str:
    """How well each score tells wrong answers from right ones."""
    lines = []
    for name, report in reports.items():
        for score, item in report.separations.items():
            areas = [f"{value:.4f}" for value in (item.aurc, item.excess_aurc, item.augrc)]
            lines.append([name, score, _area(item.auroc), *areas, f"{100 * item.coverage:.1f} %"])
    return _table("model | score | AUROC, 95 % | AURC | e-AURC | AUGRC | coverage at 5 % risk", lines)


def more_sentence(reports: Reports) -> str:
    """What the confidence ranks better than mean entropy."""
    known = {name: report.auroc_more for name, report in reports.items() if report.auroc_more is not None}
    output = [f"{name} {_area(more, 4, '+')}" for name, more in known.items()]
    return f"AUROC of the confidence less that of mean entropy, on the same answers: {', '.join(output) or '-'}."


def feature_table(reports: Reports) -> str:
    """The features that a confidence reads, and the best of those that it does not."""
    lines = []
    for name, report in reports.items():
        known = [use for use in report.features if use.auroc is not None]
        others = sorted((use for use in known if not use.stored), key=lambda use: -(use.auroc or 0.0))
        output = sorted((use for use in known if use.stored), key=lambda use: -(use.drop.value if use.drop else 0.0))
        for use in [*output, *others[:3]]:
            weight = f"{(report.weights or {})[use.name]:.3f}" if use.stored else "not read"
            lines.append([name, f"`{use.name}`", weight, f"{use.auroc:.3f}", _area(use.drop, 4)])
    return _table("model | feature | weight | AUROC alone | AUROC lost if shuffled", lines)


def switch_table(reports: Reports) -> str:
    """Every setting of the switches, under a name for each report."""
    lines = []
    for name, row in ((name, row) for name, report in reports.items() for row in report.switches):
        shares = map(percent, (row.same_text, row.right, row.passes_saved))
        lines.append([name, row.setting, f"{row.answers}", *shares, f"{row.broken}", percent(row.escalated)])
    return _table("model | switches | answers | same text | right | passes_saved | broken tokens | escalated", lines)


def shift_table(reports: Reports) -> str:
    """The door where questions or decoding are not those of the calibration."""
    lines = []
    for name, report in reports.items():
        for row in report.shifts:
            door = row.door
            shares = [percent(door.right), percent(door.opened), with_interval(door.right_of_opened)]
            auroc = "-" if door.auroc is None else f"{door.auroc:.3f}"
            cells = [*shares, row.kept(report.allowed), auroc, percent(row.strange)]
            lines.append([name, row.shift, f"{door.prompts:,}", *cells])
    return _table(
        "model | shift | answers | right of all | opened | right of those, 95 % | risk kept | AUROC | "
        "out of calibration",
        lines,
    )


def kept_sentence(reports: Reports) -> str:
    """Under which shifts the stated risk is not kept."""
    output = []
    for name, report in reports.items():
        broken = [row.shift for row in report.shifts if row.kept(report.allowed) == "no"]
        output += [f"{name}: {', '.join(broken)}"] if broken else []
    if not output:
        return "Under none of these shifts do the answers let through show a risk above the stated one."
    return f"**The stated risk is not kept** under: {'; '.join(output)}."


def strange_table(reports: Reports) -> str:
    """How often the door stays shut for prompts that are not of the model's world."""
    lines = []
    for name, row in ((name, row) for name, report in reports.items() for row in report.strange):
        cells = [f"{row.prompts}", with_interval(row.shut), percent(row.strange), percent(row.doubted)]
        lines.append([name, "all of them" if row.kind == ALL else row.kind, row.form, *cells])
    return _table(
        "model | prompts | asked as | number | door stays shut, 95 % | out of calibration | by confidence alone",
        lines,
        left=3,
    )


def promise_table(reports: Mapping[str, PromiseReport]) -> str:
    """How often a chosen door keeps its risk."""
    lines = []
    for name, report in reports.items():
        for row in report.rows:
            shares = (with_interval(row.opened), percent(row.opened_of_right), percent(row.risk, 2))
            lines.append([name, row.score, with_interval(row.kept, 2), f"{report.draws}", *shares, f"{row.shut}"])
    return _table(
        "model | door reads | risk kept, 95 % | of draws | let through, of all | of right answers | mean risk | "
        "without a door",
        lines,
    )


def worlds_table(rows: Sequence[WorldRow]) -> str:
    """Calibrations in simulated worlds: the promise kept, and the power."""
    lines = []
    for row in rows:
        parts = f"{row.found.fit:,} + {row.found.test:,}"
        asked = (parts, f"{100 * row.risk:g} %", f"{100 * (1 - row.confidence):g} %")
        others = (f"{100 * row.oracle:.1f} %", percent(row.several.chose), percent(row.before.chose))
        let_through = (row.found.opened, row.several.opened, row.before.opened, row.allowed)
        opened = (f"{100 * item:.1f} %" for item in let_through)
        lines.append(
            [row.world, *asked, with_interval(row.found.violated), with_interval(row.found.chose), *others, *opened]
        )
    return _table(
        "world | fit + test | risk allowed | limit | violated, 95 % | door found, 95 % | oracle | several starts | "
        "before | let through | several starts | before | may be",
        lines,
        left=1,
    )


def draw_features(uses: Sequence[FeatureUse], figures: Sequence[FeatureFigure], file: Path, title: str) -> None:
    """Three panels, a line for each feature: AUROC alone, log loss saved in the fit, AUROC lost where shuffled."""
    gains = {figure.name: figure for figure in figures}
    ranked = sorted(uses, key=lambda use: (use.stored, use.drop.value if use.drop else 0.0, use.auroc or 0.0))
    places = range(len(ranked))
    colors = ["C1" if use.stored else "C0" for use in ranked]
    with drawing([file], (11, 9)) as figure:
        alone, saved, lost = figure.subplots(1, 3, sharey=True)
        alone.barh(places, [(use.auroc or 0.5) - 0.5 for use in ranked], left=0.5, color=colors)
        alone.set(xlabel="AUROC of the feature alone, held out", yticks=list(places), ylim=(-1, len(ranked)))
        alone.set_yticklabels([use.name for use in ranked], fontsize="small")
        for place, use in enumerate(ranked):
            output = gains.get(use.name)
            if output is not None and output.gain is not None and output.error is not None:
                spread = 2000 * output.error
                saved.errorbar(1000 * output.gain, place, xerr=spread, fmt="o", markersize=3, color=colors[place])
        saved.axvline(0, color="grey", linewidth=0.8)
        saved.set_xscale("symlog", linthresh=1)
        saved.set(
            xlabel="log loss that it saves in the fit, 1/1000 nats\n(of one not read: beside those read; +- 2 errors)"
        )
        for place, use in enumerate(ranked):
            if use.drop is not None:
                ends = [[use.drop.value - use.drop.interval[0]], [use.drop.interval[1] - use.drop.value]]
                lost.barh(place, use.drop.value, color="C1", xerr=ends)
        lost.set(xlabel="AUROC lost where it is shuffled, held out")
        for axes in (alone, saved, lost):
            axes.grid(axis="x", alpha=0.3)
        figure.suptitle(f"{title}: orange is read by the confidence")


def _area(estimate: Estimate | None, digits: int = 3, sign: str = "") -> str:
    """A figure that is no share, and its interval; the sign is `+` for a difference."""
    return with_interval(estimate, digits, 1, "", sign)
