"""`python -m sigma0.bench collapse`: false stops, loops ended, and the cost of looking."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

from sigma0.bench.core.conditions import device_name, git_commit
from sigma0.bench.core.options import CodeFiles, ListFiles, ReportFile
from sigma0.bench.core.output import BenchTable, measuring, step_bar, tell_report
from sigma0.commands.options import AsJson, Threads
from sigma0.decode.repetition import CollapseStop
from sigma0.models.load import load

SPANS = 3


def collapse(
    models: Annotated[list[str], typer.Argument(help="Shipped names or folders of models of pocket's world.")],
    n: Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out questions, and stories, of each model.")] = 500,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of the cost, every way once in each.")] = 60,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of a round.")] = 32,
    texts: Annotated[str, typer.Option(help="A folder whose tokenizer cuts the files below.")] = "",
    prose: Annotated[list[Path], typer.Option(help="Text files; loops are spans of the first one.")] = [],  # noqa: B006
    code: CodeFiles = [],  # noqa: B006
    lists: ListFiles = [],  # noqa: B006
    threads: Threads = 1,
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """What `--on-collapse stop` ends on ordinary texts and on loops, and what it and the verdict cost a token."""
    with measuring(threads):
        files = {"prose": tuple(prose), "code": tuple(code), "lists": tuple(lists)}
        if any(files.values()) and not (texts and prose):
            raise ValueError("files need --texts, a folder with a tokenizer, and one --prose, of which loops are made")
        report = _study(models, n, rounds, new_tokens, texts, files)
    if tell_report(report, out, as_json):
        _print(report)


def _study(
    models: list[str], n: int, rounds: int, new_tokens: int, folder: str, files: dict[str, tuple[Path, ...]]
) -> dict[str, Any]:
    from sigma0.bench.collapse import measure as study
    from sigma0.bench.pocket.prompts import micro_world
    from sigma0.bench.proximity.measure import by_kind, loops

    chosen = CollapseStop()
    prompts = list(micro_world(n, "test", 0))
    result: dict[str, Any] = {}
    series: list[study.Series] = []
    with step_bar("answers and rounds", len(models) * (n + rounds + 1)) as advance:
        for name in models:
            looped, tokenizer = load(name, device="cpu", dtype="float32")
            if not series:
                series += study.stories(tokenizer, n, 0)
            cut = study.answers_cut(looped, tokenizer, prompts, 64, advance)
            costs = study.costs(looped, tokenizer, prompts, new_tokens, rounds, advance)
            result[Path(name).name] = {"answers": n, "cut": cut, "costs": costs}
    if folder:
        read = by_kind(files, AutoTokenizer.from_pretrained(folder))
        series += [item for text in read for item in study.stretches(text.kind, text.ids)]
        for loop in loops(read[0].ids, SPANS):
            series.append(study.series(f"{loop.kind} loops", loop.ids.tolist(), loop.first))
    return {
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git_commit(),
        **{name: getattr(chosen, name) for name in ("tau", "running", "every")},
        "new_tokens": new_tokens,
        "rounds": rounds,
        "models": result,
        "texts": study.rows(series, chosen.tau, chosen.running),
        "grid": study.grid(series),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    ended = [
        (row["kind"], str(row["texts"]), str(row["ended"]), "-" if row["late"] is None else f"{row['late']:.0f}")
        for row in report["texts"]
    ]
    title = f"ended where the last {report['running']} proximities reach {report['tau']}"
    BenchTable(("texts", "how many", "ended", "ids behind the onset"), ended, title).show()
    costs = []
    for name, output in report["models"].items():
        for row in output["costs"]:
            low, high = row["ratio"]["interval"]
            ratio = (f"{row['ratio']['value']:.3f}", f"{low:.3f}-{high:.3f}")
            costs.append((name, row["way"], f"{row['ms']:.3f}", *ratio))
    title = f"CPU time a token, {report['new_tokens']} tokens, {report['rounds']} rounds"
    headings = ("model", "on", "ms/token", "over off", "95 %")
    BenchTable(headings, costs, title, left=headings[:2]).show()
    for name, output in report["models"].items():
        console.print(f"{name}: {output['cut']} of {output['answers']} ordinary answers cut")
