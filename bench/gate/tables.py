"""The gate report as tables, narrow enough for 80 columns."""

from rich.console import Console
from rich.table import Table

from sigma0.bench.core.tables import BenchTable
from sigma0.bench.gate.measure import Depths, GateReport
from sigma0.calibrate.bootstrap import Estimate


def print_gate(report: GateReport, console: Console | None = None) -> None:
    """Print depths, correlations, abstention and the comparison of the rules; brackets hold 95 % intervals."""
    console = console or Console()
    rule = ", ".join(f"{key} {value}" for key, value in report.rule.items() if value is not None)
    console.print(
        f"{report.model}, {report.total_loops} loops, {report.items} questions ({report.split} split, seed "
        f"{report.seed})\nexit rule: {rule}",
        highlight=False,
    )
    console.print(_depths("Mean loops, by kind of token", report.by_kind))
    console.print(_depths("Mean loops of answer tokens, by difficulty", report.by_difficulty))
    console.print(_depths("Mean loops of keys, by difficulty", report.key_by_difficulty))
    correlations = [
        (name, "constant" if rho is None else _estimate(rho, 2)) for name, rho in report.correlations.items()
    ]
    console.print(BenchTable(("", "rho"), correlations, "Rank correlation (Spearman)").rich(compact=True))
    console.print(_abstention(report))
    console.print(_rules(report))


def _abstention(report: GateReport) -> Table:
    title = f"Doubt of whole answers at full depth, {report.wrong:.1%} wrong: AUROC up, AURC and AUGRC down"
    cells = []
    for name, score in report.abstention.items():
        areas = (_estimate(area, 2) for area in (score.aurc, score.augrc))
        cells.append((name, "-" if score.auroc is None else _estimate(score.auroc, 2), *areas))
    return BenchTable(("", "AUROC", "AURC", "AUGRC"), cells, title).rich(compact=True)


def _rules(report: GateReport) -> Table:
    title = (
        f"Rules, each at its cheapest threshold with 98 % agreement on answers of the calibration split; "
        f"{report.rules_items} questions: agreement with full depth under teacher forcing, and free runs (finish), in %"
    )
    cells: list[tuple[str, ...]] = []
    for mode, row in report.rules.items():
        if row is None:
            cells.append((mode, "none", *[""] * 5))
            continue
        threshold = row.rule[{"qexit": "q", "margin": "theta"}.get(mode, "eps")]
        agreement = (_percent(row.agreement), _percent(row.agreement_on_answers))
        free = (f"{100 * share:.1f}" for share in (row.free.same, row.free.passes_saved, row.free.rows_saved))
        cells.append((mode, str(threshold), *agreement, *free))
    for name, saved in (("oracle", report.oracle_saved), ("settled oracle", report.settled_saved)):
        cells.append((name, *[""] * 4, f"{100 * saved:.1f}", ""))
    headings = ("", "at", "all tokens", "answer tokens", "same", "passes", "rows")
    table = BenchTable(headings, cells, title).rich(compact=True)
    table.caption = "same: answers equal to full depth's; passes, rows: passes_saved, rows_saved"
    return table


def _depths(title: str, groups: dict[str, Depths]) -> Table:
    cells = []
    for name, group in groups.items():
        depths = (f"{value:.2f}" for value in (group.exit, group.oracle, group.settled))
        cells.append((name, str(group.tokens), *depths, _percent(group.agreement)))
    return BenchTable(("", "tokens", "exit", "oracle", "settled", "as at full depth, %"), cells, title).rich(
        compact=True
    )


def _percent(share: Estimate) -> str:
    low, high = share.interval
    return _estimate(Estimate(100 * share.value, (100 * low, 100 * high)), 1)


def _estimate(estimate: Estimate, digits: int) -> str:
    low, high = estimate.interval
    return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
