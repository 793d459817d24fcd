"""Option types that several commands share."""

from typing import Annotated

import typer

# Rotated telemetry files that are kept by default.
KEPT_FILES = 5
Model = Annotated[str, typer.Option(help="Shipped name, folder, or hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
