"""`python -m sigma0.bench gate`: what the exit gate knows."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from sigma0.bench.core.options import ExitJson, StorySeed, parsed_exit
from sigma0.bench.core.output import BenchTable, measuring, tell_report
from sigma0.bench.pocket.card import Figures, correlation_rows, doubt_rows, estimate_text
from sigma0.calibrate.agreement import THRESHOLD
from sigma0.commands.console import progress_bar
from sigma0.commands.options import AsJson, Device, ModelArgument, StatedDtype, Threads
from sigma0.models.load import load


def gate(
    model: ModelArgument = "pocket",
    exit_config: ExitJson = "",
    n: Annotated[int, typer.Option("-n", "--n", help="Held-out stories, one question each.")] = 1000,
    rules_n: Annotated[int, typer.Option(help="The first of them, on which the exit rules are compared.")] = 200,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    seed: StorySeed = 0,
    device: Device = "auto",
    dtype: StatedDtype = "float32",
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Exit depth beside difficulty and the oracles, and saturation as a sign of a wrong answer."""
    with measuring(threads):
        from sigma0.bench.gate.measure import measure_gate

        looped, tokenizer = load(model, device=device, dtype=dtype)
        with progress_bar("questions", 2 * n + 4, hidden=as_json) as advance:
            report = measure_gate(looped, tokenizer, model, parsed_exit(exit_config), n, rules_n, split, seed, advance)
    if tell_report(report, None, as_json):
        _print(report)


def _print(report: Figures) -> None:
    """Depths, correlations, abstention and the comparison of the rules, narrow enough for 80 columns."""
    rule = ", ".join(f"{key} {value}" for key, value in report["rule"].items() if value is not None)
    console = Console()
    console.print(
        f"{report['model']}, {report['total_loops']} loops, {report['items']} questions ({report['split']} split, seed "
        f"{report['seed']})\nexit rule: {rule}",
        highlight=False,
    )

    def show(title: str, headings: tuple[str, ...], cells: Sequence[Sequence[str]], caption: str | None = None) -> None:
        BenchTable(headings, cells, title).show(compact=True, caption=caption)

    for title, groups in (
        ("Mean loops, by kind of token", "by_kind"),
        ("Mean loops of answer tokens, by difficulty", "by_difficulty"),
        ("Mean loops of keys, by difficulty", "key_by_difficulty"),
    ):
        depths = [
            (
                *(name, str(group["tokens"])),
                *(f"{group[item]:.2f}" for item in ("exit", "oracle", "settled")),
                _percent(group["agreement"]),
            )
            for name, group in report[groups].items()
        ]
        show(title, ("", "tokens", "exit", "oracle", "settled", "as at full depth, %"), depths)
    show("Rank correlation (Spearman)", ("", "rho"), correlation_rows(report, _estimate))
    title = f"Doubt of whole answers at full depth, {report['wrong']:.1%} wrong: AUROC up, AURC and AUGRC down"
    show(title, ("", "AUROC", "AURC", "AUGRC"), doubt_rows(report, _estimate))
    title = (
        "Rules, each at its cheapest threshold with 98 % agreement on answers of the calibration split; "
        f"{report['rules_items']} questions: agreement with full depth under teacher forcing, and free runs (finish), "
        "in %"
    )
    cells: list[tuple[str, ...]] = []
    for mode, row in report["rules"].items():
        if row is None:
            cells.append((mode, "none", *[""] * 5))
            continue
        agreement = (_percent(row["agreement"]), _percent(row["agreement_on_answers"]))
        free = (f"{100 * row['free'][share]:.1f}" for share in ("same", "passes_saved", "rows_saved"))
        cells.append((mode, str(row["rule"][THRESHOLD[mode]]), *agreement, *free))
    for name, saved in (("oracle", "oracle_saved"), ("settled oracle", "settled_saved")):
        cells.append((name, *[""] * 4, f"{100 * report[saved]:.1f}", ""))
    headings = ("", "at", "all tokens", "answer tokens", "same", "passes", "rows")
    show(title, headings, cells, "same: answers equal to full depth's; passes, rows: passes_saved, rows_saved")


_estimate = partial(estimate_text, digits=2, form="{} [{}, {}]")
_percent = partial(estimate_text, digits=1, scale=100, form="{} [{}, {}]")
