"""`python -m sigma0.bench proximity`: the fit of the collapse proximity, and how it tells loops from texts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigma0.bench.core.options import CodeFiles, CurvesPicture, ListFiles, ReportFile
from sigma0.bench.core.output import BenchTable, drawing, measuring, step_bar, tell_report
from sigma0.bench.proximity import measure
from sigma0.bench.proximity.measure import LONGEST, by_kind, loops
from sigma0.commands.options import AsJson, Threads
from sigma0.kernels.collapse import CollapseRule

SPANS = 3


def proximity(
    model: Annotated[str, typer.Argument(help="A causal model's folder: its tokenizer cuts, its certainty is read.")],
    prose: Annotated[list[Path], typer.Option(help="Text files; the first half of the first one is fitted on.")],
    code: CodeFiles = [],  # noqa: B006
    lists: ListFiles = [],  # noqa: B006
    windows: Annotated[int, typer.Option(min=2, help="Readings of each text at most.")] = 2000,
    threads: Threads = 1,
    out: ReportFile = None,
    picture: CurvesPicture = None,
    as_json: AsJson = False,
) -> None:
    """Fit the parts of the proximity on one half of texts and loops, and report on the other."""
    with measuring(threads):
        report, curves = _study(model, {"prose": tuple(prose), "code": tuple(code), "lists": tuple(lists)}, windows)
        if picture is not None:
            _draw(curves, picture)
    if tell_report(report, out, as_json):
        _print(report)


def _study(
    folder: str, files: dict[str, tuple[Path, ...]], windows: int
) -> tuple[dict[str, Any], dict[str, list[tuple[float, float]]]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = by_kind(files, tokenizer)
    collapsed = list(loops(texts[0].ids, SPANS))
    chunks = sum(len(text.ids) // measure.CHUNK + 2 for text in texts) + len(collapsed) * -(-LONGEST // measure.CHUNK)
    with step_bar("chunks read", chunks) as advance:
        model.register_forward_hook(lambda *_: advance())
        readings = measure.read_texts(model, texts, windows) + measure.read_loops(model, collapsed)
    fitted, ids_alone = measure.fit(readings), [measure.without_certainty(item) for item in readings]
    held_out = [item for item in readings if not item.fitted]
    calm = measure.traits_by_kind(held_out, measure.TEXTS)
    areas, curves = {}, {}
    for item in held_out:
        if item.kind not in measure.TEXTS:
            area, curve = measure.roc(fitted, np.concatenate(list(calm.values())), item.traits)
            areas[item.kind], curves[f"{item.kind} loops against all texts"] = round(area, 5), curve
            areas[f"{item.kind} against prose"] = round(measure.roc(fitted, calm["prose"], item.traits)[0], 5)
    report = {
        "model": Path(folder).name,
        "texts": [
            {"kind": text.kind, "name": text.name, "sha256": text.sha256, "tokens": len(text.ids)} for text in texts
        ],
        "parts": asdict(fitted),
        "figures": measure.figures(fitted, readings),
        "figures_of_ids_alone": measure.figures(fitted, ids_alone),
        "roc_area": areas,
    }
    return report, curves


def _draw(curves: Mapping[str, Sequence[tuple[float, float]]], file: Path) -> None:
    """Share of loops found over the share of false alarms, the latter on a log scale."""
    with drawing([file], (6, 4), dpi=100) as figure:
        axes = figure.subplots()
        for name, curve in curves.items():
            axes.plot([max(false, 1e-4) for false, _ in curve], [true for _, true in curve], label=name)
        axes.set(xscale="log", xlabel="false alarms", ylabel="loops found", xlim=(1e-4, 1), ylim=(0, 1.02))
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)


def _print(report: dict[str, Any]) -> None:
    headings = ("what", "fitted on", "readings", "1 %", "median", "99 %", "lowest", "highest", "0.5 or more")
    cells = []
    for row in report["figures"]:
        low, _, median, _, high = row["quantiles"]
        figures = [f"{value:.3f}" for value in (low, median, high, row["lowest"], row["highest"])]
        what = (f"{row['kind']}: {row['name']}", "yes" if row["fitted"] else "", str(row["readings"]))
        cells.append((*what, *figures, f"{row['alarms']:.1%}"))
    console = Console()
    BenchTable(headings, cells, f"proximity, read by {report['model']}").show(no_wrap=("what",))
    for name, part in report["parts"].items():
        if isinstance(part, dict):
            console.print(f"{name}: from {part['low']} to {part['high']}, weight {part['weight']}")
    console.print("area under the curve:", ", ".join(f"{name} {area}" for name, area in report["roc_area"].items()))
    if report["parts"] != asdict(CollapseRule()):
        console.print("the parts that sigma0.kernels.collapse ships are others", style="yellow")
