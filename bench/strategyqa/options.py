"""Options that the commands of this bench have in common."""

from pathlib import Path
from typing import Annotated

import typer

DataOption = Annotated[
    str, typer.Option(help="Folder of train.json and dev.json, a dataset's hub id, or world: the micro-world.")
]
ItemsOption = Annotated[int | None, typer.Option("-n", "--n", min=1, help="The first items at most.")]
LadderOption = Annotated[str | None, typer.Option(help="Rungs in place of --model, the lowest first.")]
BaseUrlOption = Annotated[str | None, typer.Option(help="A server that speaks OpenAI's protocol.")]
EffortOption = Annotated[str, typer.Option(help="minimal, low, medium or high.")]
TemperatureOption = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option(help="Of the sampling, and of the micro-world's stories.")]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Items at a time, and questions in a batch.")]
RetriesOption = Annotated[int, typer.Option(min=0, help="How often an item is begun anew that got no answer.")]
CacheOption = Annotated[
    Path | None, typer.Option(help="Answers by model and prompt: resumes a run, and repeats it bit for bit.")
]
ParagraphsOption = Annotated[
    Path | None, typer.Option(help="L2-rag: the published paragraph file; else facts of train are searched.")
]
