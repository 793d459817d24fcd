"""`sigma0 trail`: what a ladder or an outer loop decided, out of the file that it left."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigma0.commands.console import loading, one_line_errors, printable
from sigma0.commands.options import AsJson

if TYPE_CHECKING:
    from sigma0.reason.trail import Line

# characters of an answer or of code that a line shows
SHOWN = 100


def trail(
    file: Annotated[Path, typer.Argument(help="A trail, as generate --trail FILE or solve --trail FILE writes it.")],
    as_json: AsJson = False,
) -> None:
    """Show the decisions of a ladder, each made again from what was recorded, or the course of an outer loop."""
    from sigma0.reason.trail import Decision, Outcome, read_lines

    with one_line_errors():
        if not is_of_a_loop(file):
            with loading("what reads a ladder's trail", hidden=as_json):
                from sigma0.commands.ladder import show_trail

            show_trail(file, as_json)
            return
        lines = read_lines(file)
    if as_json:
        decisions = Counter(line.what for line in lines if isinstance(line, Decision))
        last = lines[-1]
        outcome = {"solved": last.solved, "answer": last.answer, "why": last.why} if isinstance(last, Outcome) else None
        kinds = Counter(line.kind for line in lines)
        typer.echo(json.dumps({"lines": kinds, "decisions": decisions, "outcome": outcome}, ensure_ascii=False))
    else:
        print_lines(lines)


def is_of_a_loop(file: Path) -> bool:
    """Whether a file's first line is that of an outer loop; what cannot be read is left to whoever reads it next."""
    from sigma0.reason.trail import is_heading

    try:
        with file.open(encoding="utf-8") as opened:
            return is_heading(opened.readline())
    except (OSError, ValueError):
        return False


def print_lines(lines: "Sequence[Line]") -> None:
    """A line for each question, run and decision, in their order."""
    from sigma0.reason.trail import Call, Decision, Heading, Run

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for line in lines:
        if isinstance(line, Heading):
            models = _short(", ".join(line.models)) + (" (resumed)" if line.resumed else "")
            table.add_row(Text(line.strategy, style="bold"), Text(models), Text(_short(line.problem)))
        elif isinstance(line, Call):
            answer = line.failed if line.answer is None else str(line.answer.get("text", ""))
            table.add_row("asked", Text(_short(line.purpose)), Text(_short(answer or ""), style="dim"))
        elif isinstance(line, Run):
            ended = "ok" if line.result.get("ok") else f"exit {line.result.get('exit_code')}"
            table.add_row("ran", Text(_short(line.purpose)), Text(f"{ended}: {_short(line.code)}", style="dim"))
        else:
            decided = isinstance(line, Decision)
            what = _short(line.what) if isinstance(line, Decision) else "solved" if line.solved else "NOT solved"
            table.add_row("decided" if decided else "ended", Text(what, style="bold"), Text(printable(line.why)))
    console.print(table)


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
