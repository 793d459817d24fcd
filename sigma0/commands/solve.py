"""`sigma0 solve`: the outer loops from the command line, with their progress, a trail, and what came of it."""

import json
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from sigma0.checkpoints import resolve_model
from sigma0.commands.console import loading, one_line_errors, printable
from sigma0.commands.options import SolveOptions, grouped


@grouped
def solve(
    problem: Annotated[str, typer.Argument(help="What is to be solved; - reads it from standard input.")],
    asked: SolveOptions,
) -> None:
    """Solve a problem by an outer loop; the exit code is 0 if its own gate was passed, 1 if not."""
    with one_line_errors(), ExitStack() as waiting:
        text = typer.get_text_stream("stdin").read().strip() if problem == "-" else problem
        if not text.strip():
            raise ValueError("the problem is empty")
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("the problem is no UTF-8 text")
        asked.check()
        alone = asked.ladder is None and asked.base_url is None
        if alone:
            resolve_model(asked.model)
        waiting.enter_context(loading(asked.ladder or asked.model, hidden=asked.as_json))
        from sigma0.checkpoints.about import unseen_note
        from sigma0.commands.examples import about_model
        from sigma0.commands.solve_models import open_chats
        from sigma0.commands.solve_progress import SolveProgress, summary
        from sigma0.commands.solve_strategies import STRATEGIES, Order
        from sigma0.reason.chat import ChatFailed
        from sigma0.reason.desk import Desk, Limits
        from sigma0.reason.trail import Trail

        limits = Limits(calls=asked.max_calls, seconds=asked.max_seconds)
        chats = open_chats(asked.model, asked.ladder, asked.base_url, asked.device, asked.dtype)
        waiting.close()
        if alone and (note := unseen_note(*about_model(asked.model), text)) is not None:
            typer.echo(note, err=True)
        with SolveProgress(asked.strategy, hidden=asked.as_json) as progress:
            order = Order(text, asked, chats, Desk(Trail(asked.trail, progress), limits, asked.seed))
            try:
                result = STRATEGIES[asked.strategy](order)
            except ChatFailed as error:
                kept = f"; --memory {asked.memory} --resume goes on" if asked.memory is not None else ""
                raise ValueError(f"{error}{kept}") from error
    if asked.patch is not None:
        asked.patch.write_text(result.report["patch"], encoding="utf-8")
    if asked.as_json:
        typer.echo(json.dumps({"strategy": asked.strategy, **result.report}, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        outcome = f"\n{'solved' if result.solved else 'NOT solved'}: {printable(result.why)}"
        for line in (printable(result.text), outcome, *summary(result.report)):
            console.print(line, markup=False)
    if not result.solved:
        raise typer.Exit(1)
