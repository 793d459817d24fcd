"""`python -m sigma0.bench distill`: a program without a model, out of plans that a model verified by itself."""

from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from sigma0.bench.core.ledger import OWN, append_row, check_ledger
from sigma0.bench.core.options import AsJsonLines, FormsModel, HardStories, LedgerFile, ShownExamples
from sigma0.bench.core.output import tell_rows
from sigma0.bench.outer.command import open_asked
from sigma0.bench.outer.induce import FEWEST, Trace, induce
from sigma0.bench.outer.measure import Result, hard_questions, questions, to_row, where_from
from sigma0.bench.outer.ways import MAX_TOKENS
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import Threads
from sigma0.reason.desk import Desk
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.messages import Usage
from sigma0.reason.trail import Trail


def distill(
    model: FormsModel = "pocket-solver",
    seen: Annotated[int, typer.Option(min=1, help="Stories of the training split, one question each.")] = 400,
    n: HardStories = 500,
    seed: Annotated[int, typer.Option(help="Of the stories.")] = 0,
    shown: ShownExamples = 3,
    program: Annotated[Path, typer.Option(help="Where the program is written, as JSON.")] = Path("program.json"),
    threads: Threads = 1,
    out: LedgerFile = OWN,
    as_json: AsJsonLines = False,
) -> None:
    """Make a program without a model of what a lemma graph verified, and measure it on held-out questions."""
    torch.set_num_threads(threads)
    started = datetime.now(timezone.utc).isoformat()
    with one_line_errors():
        check_ledger(out)
        items = hard_questions(n, seed)
        asked, _ = open_asked(model, items, where_from(seed), shown)
        traces = []
        with progress_bar("questions", seen, as_json) as advance:
            for place, item in enumerate(islice(questions("train", seed), seen)):
                desk = Desk(Trail(), seed=place)
                solution = FormSolver(asked.chat, desk, LemmaSettings(max_tokens=MAX_TOKENS)).solve(item.prompt)
                # the known answer is not looked at: what the graph verified is taken for right
                if solution.graph is not None:
                    traces.append(Trace(item.prompt, solution.graph.lemmas))
                advance(place + 1)
        made = induce(traces, FEWEST)
        program.write_text(made.to_json() + "\n")
        answers = [made.answer(item.prompt) for item in items]
        results = [
            Result(answer or "", answer == item.answer, answer is not None, Usage())
            for answer, item in zip(answers, items, strict=True)
        ]
        way = f"program of {len(traces)} traces"
        row = to_row(way, asked, results, {}, seed, started)
        append_row(out, row)
    closing = (
        f"{len(traces)} of {seen} questions verified; {program}: {len(made.pointers)} pointers, {len(made.kinds)} kinds"
        f"; 1 row in {out}"
    )

    def told() -> None:
        interval = f"{row.right.low:.1%} to {row.right.high:.1%}"
        wrong, silent = row.accepted_wrong.value, 1 - row.accepted.value
        typer.echo(
            f"right {row.right.value:.1%} ({interval}), wrong {wrong:.1%}, without an answer {silent:.1%} of {n}"
        )

    tell_rows([row], as_json, told, closing)
