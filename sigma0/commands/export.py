"""`sigma0 export`: a checkpoint folder that other tools load."""

import json
from typing import Annotated

import typer

from sigma0.checkpoints import resolve_model
from sigma0.commands.console import loading, one_line_errors
from sigma0.commands.options import ModelArgument, Recurrence, Stride


def export(
    model: ModelArgument,
    folder: Annotated[str, typer.Argument(help="A new or empty folder.")],
    exit_config: Annotated[
        str | None, typer.Option(help='When its tokens stop by default, as JSON: {"mode": "fixed", "depth": 2}')
    ] = None,
    recurrence: Recurrence = None,
    stride: Stride = None,
) -> None:
    """Write a folder that other tools load with trust_remote_code=True, through this package."""
    with one_line_errors(), loading(model):
        resolve_model(model)
        from sigma0.config import ExitConfig
        from sigma0.models.export import export as write_folder
        from sigma0.models.load import load

        looped, tokenizer = load(model, device="cpu", recurrence=recurrence, stride=stride)
        if exit_config is not None:
            config = ExitConfig.parse(json.loads(exit_config))
            config.stops_at(looped.num_loops)
            looped.generation_config.exit_config = config
        target = write_folder(looped, tokenizer, folder)
    typer.echo(f"wrote {target}")
