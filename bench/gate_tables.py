"""The gate report as tables."""

from rich.console import Console
from rich.table import Table

from sigma0.bench.gate import Depths, GateReport


def print_gate(report: GateReport, console: Console | None = None) -> None:
    """Print depths, correlations and abstention."""
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
    table = _table("Rank correlation (Spearman) of", "", "rho", "95 % interval")
    for name, found in report.correlations.items():
        told = ("constant", "") if found.rho is None else (f"{found.rho:.2f}", _interval(found.interval))
        table.add_row(name, *told)
    console.print(table)
    table = _table(
        f"Doubt of whole answers at full depth, {report.wrong:.1%} wrong: AUROC up, AURC and AUGRC down",
        *("", "AUROC", "95 %", "AURC", "95 %", "AUGRC", "95 %"),
    )
    for name, score in report.abstention.items():
        area = "-" if score.auroc is None else f"{score.auroc:.3f}"
        table.add_row(
            name,
            *(area, _interval(score.auroc_interval, 3)),
            *(f"{score.aurc:.3f}", _interval(score.aurc_interval, 3)),
            *(f"{score.augrc:.3f}", _interval(score.augrc_interval, 3)),
        )
    console.print(table)
    console.print(_rules(report))


def _rules(report: GateReport) -> Table:
    table = _table(
        f"Rules at the cheapest threshold with 98 % agreement on the calibration split; {report.rules_items} questions",
        *("", "threshold", "all tokens", "95 %", "answer tokens", "95 %", "same answers", "passes_saved", "rows_saved"),
    )
    for mode, row in report.rules.items():
        if row is None:
            table.add_row(mode, "none")
            continue
        threshold = row.rule[{"qexit": "q", "margin": "theta"}.get(mode, "eps")]
        table.add_row(
            *(mode, str(threshold), f"{row.agreement:.1%}", _interval(row.agreement_interval, 3)),
            *(f"{row.agreement_on_answers:.1%}", _interval(row.agreement_on_answers_interval, 3)),
            *(f"{share:.1%}" for share in (row.free.same, row.free.passes_saved, row.free.rows_saved)),
        )
    table.add_row("oracle", *[""] * 6, f"{report.oracle_saved:.1%}")
    table.add_row("settled oracle", *[""] * 6, f"{report.settled_saved:.1%}")
    return table


def _depths(title: str, groups: dict[str, Depths]) -> Table:
    table = _table(title, "", "tokens", "exit", "oracle", "settled", "as at full depth", "95 %")
    for name, group in groups.items():
        low, high = group.agreement_interval
        table.add_row(
            name,
            str(group.tokens),
            *(f"{value:.2f}" for value in (group.exit, group.oracle, group.settled)),
            f"{group.agreement:.1%}",
            f"{100 * low:.1f} to {100 * high:.1f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _interval(interval: tuple[float, float] | None, digits: int = 2) -> str:
    return "" if interval is None else f"{interval[0]:.{digits}f}\u2011{interval[1]:.{digits}f}"
