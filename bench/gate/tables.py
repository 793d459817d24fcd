"""The gate report as tables, narrow enough for 80 columns."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

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
    table = _table("Rank correlation (Spearman)", "", "rho")
    for name, found in report.correlations.items():
        table.add_row(name, "constant" if found is None else _estimate(found, 2))
    console.print(table)
    console.print(_abstention(report))
    console.print(_rules(report))


def _abstention(report: GateReport) -> Table:
    title = f"Doubt of whole answers at full depth, {report.wrong:.1%} wrong: AUROC up, AURC and AUGRC down"
    table = _table(title, "", "AUROC", "AURC", "AUGRC")
    for name, score in report.abstention.items():
        areas = (_estimate(area, 2) for area in (score.aurc, score.augrc))
        table.add_row(name, "-" if score.auroc is None else _estimate(score.auroc, 2), *areas)
    return table


def _rules(report: GateReport) -> Table:
    title = (
        f"Rules, each at its cheapest threshold with 98 % agreement on answers of the calibration split; "
        f"{report.rules_items} questions: agreement with full depth under teacher forcing, and free runs (finish), in %"
    )
    table = _table(title, "", "at", "all tokens", "answer tokens", "same", "passes", "rows")
    for mode, row in report.rules.items():
        if row is None:
            table.add_row(mode, "none")
            continue
        threshold = row.rule[{"qexit": "q", "margin": "theta"}.get(mode, "eps")]
        table.add_row(
            *(mode, str(threshold), _percent(row.agreement)),
            _percent(row.agreement_on_answers),
            *(f"{100 * share:.1f}" for share in (row.free.same, row.free.passes_saved, row.free.rows_saved)),
        )
    table.add_row("oracle", *[""] * 4, f"{100 * report.oracle_saved:.1f}")
    table.add_row("settled oracle", *[""] * 4, f"{100 * report.settled_saved:.1f}")
    table.caption = "same: answers equal to full depth's; passes, rows: passes_saved, rows_saved"
    return table


def _depths(title: str, groups: dict[str, Depths]) -> Table:
    table = _table(title, "", "tokens", "exit", "oracle", "settled", "as at full depth, %")
    for name, group in groups.items():
        depths = (f"{value:.2f}" for value in (group.exit, group.oracle, group.settled))
        table.add_row(name, str(group.tokens), *depths, _percent(group.agreement))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _percent(share: Estimate) -> str:
    low, high = share.interval
    return _estimate(Estimate(100 * share.value, (100 * low, 100 * high)), 1)


def _estimate(estimate: Estimate, digits: int) -> str:
    low, high = estimate.interval
    return f"{estimate.value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
