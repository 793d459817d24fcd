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
    return "" if interval is None else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"
