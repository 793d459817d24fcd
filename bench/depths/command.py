"""`python -m sigma0.bench depths`: at which loop each word of a model's answers exits."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import sigma0
from sigma0.bench.core.options import ReportFile, Stories, StorySeed, WorldModel
from sigma0.bench.core.output import BenchTable, drawing, measuring, step_bar, tell_report
from sigma0.bench.pocket.prompts import micro_world
from sigma0.commands.options import AsJson, Threads


def depths(
    model: WorldModel = "pocket",
    n: Stories = 200,
    seed: StorySeed = 0,
    threads: Threads = 1,
    out: ReportFile = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw them, as .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """The loop at which each word of a model's answers exits: which words need depth."""
    seen: dict[str, list[int]] = defaultdict(list)
    with measuring(threads):
        looped, tokenizer = sigma0.load(model, device="cpu", dtype="float32")
        with step_bar("questions", n, hidden=as_json) as advance:
            for prompt in micro_world(n, "test", seed):
                for token in sigma0.stream(looped, tokenizer, prompt.content):
                    seen[token.text.strip()].append(token.depth)
                advance()
    by_depth = sorted(seen.items(), key=lambda item: -np.mean(item[1]))
    words = [{"word": w, "count": len(d), "depth": float(np.mean(d)), "deepest": max(d)} for w, d in by_depth]
    report = {"model": model, "questions": n, "seed": seed, "loops": looped.num_loops, "words": words}
    if picture is not None:
        with drawing([picture], (6.4, 4.8)) as figure:
            axes = figure.subplots()
            axes.barh([word for word, _ in by_depth[:20]], [float(np.mean(entry)) for _, entry in by_depth[:20]])
            axes.set_xlabel("mean loop of the exit")
    if tell_report(report, out, as_json):
        cells = [(word, f"{len(entry)}", f"{np.mean(entry):.2f}", f"{max(entry)}") for word, entry in by_depth[:20]]
        BenchTable(("word", "count", "mean loop", "deepest"), cells, f"{model}, {n} questions").show()
