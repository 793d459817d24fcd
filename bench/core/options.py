"""The options that benchmarks share beside those of the product's commands, each defined once."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import BaseModel

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

ExitJson = Annotated[str, typer.Option(help="Exit rule as JSON; by default the checkpoint's own.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="New tokens of each answer at most.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")]
WorkerCount = Annotated[
    int, typer.Option(min=1, help="Processes that the work is spread over, each with the model; the extra ray.")
]


def with_options(model: type[BaseModel], *left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of a model as options, in the place of its parameter of that model.

    Args:
        model: Whose fields are annotated as options and have defaults.
        left_out: Fields that keep their defaults.
    """
    fields = {name: field for name, field in model.model_fields.items() if name not in left_out}

    def give(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        name = next(name for name, hint in hints.items() if hint is model)

        @wraps(command)
        def called(**given: Any) -> None:
            command(**{name: model(**{field: given.pop(field) for field in fields})}, **given)

        own, types = signature(command), get_type_hints(model, include_extras=True)
        options = [
            Parameter(field, Parameter.KEYWORD_ONLY, default=found.default, annotation=types[field])
            for field, found in fields.items()
        ]
        at = list(own.parameters).index(name)
        others = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own.parameters.values()]
        parameters = [*others[:at], *options, *others[at + 1 :]]
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {**hints, **{field: types[field] for field in fields}}
        return called

    return give
