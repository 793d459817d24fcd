"""The options that benchmarks share beside those of the product's commands, each defined once."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sigma0.config import ExitConfig

LEDGER = Path("bench/results/leaderboard.jsonl")
# Where rows go that are not asked to be recorded there.
OWN = Path("sigma0-bench/leaderboard.jsonl")

AsJsonLines = Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")]
LedgerFile = Annotated[Path, typer.Option(help="File that the rows are appended to.")]
ReportFile = Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")]
CurvesPicture = Annotated[Path | None, typer.Option(help="Where to draw the curves, as .svg or .png.")]

FormsModel = Annotated[str, typer.Argument(help="Shipped name, folder or hub id.")]
HardStories = Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out hard stories, one question each.")]
ShownExamples = Annotated[
    int, typer.Option(min=1, help="Examples of each form, for a model that was not taught the forms.")
]
WorldModel = Annotated[str, typer.Argument(help="Shipped name, folder or hub id of a model of pocket's world.")]
WorldSplit = Annotated[str, typer.Option(help="train, calibration or test.")]
Stories = Annotated[int, typer.Option("-n", "--n", min=2, help="Held-out stories, one question each.")]
StorySeed = Annotated[int, typer.Option(help="Seed of the stories.")]
LookUps = Annotated[bool, typer.Option("--look-ups", help="Only questions of places and families, no yes or no.")]
HardHalf = Annotated[bool, typer.Option("--hard", help="Only questions of the hard half.")]
CodeFiles = Annotated[list[Path], typer.Option(help="Likewise: text files, or HumanEval's problems as .jsonl.gz.")]
ListFiles = Annotated[list[Path], typer.Option(help="Likewise: text files.")]


def parsed_exit(text: str) -> ExitConfig | None:
    """The rule of such an option; None: the checkpoint's own."""
    return ExitConfig.parse(json.loads(text)) if text else None


ExitJson = Annotated[str, typer.Option(help="Exit rule as JSON; by default the checkpoint's own.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="New tokens of each answer at most.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Processes that the work is spread over, each with the model; the extra ray.")
]
