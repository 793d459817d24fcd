"""`python -m sigma0.bench course`: record the course that `speed --course recorded` replays."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sigma0.bench.core.options import OWN, ExitJson
from sigma0.bench.speed.courses import RECORDED, described, record_course
from sigma0.commands.console import one_line_errors
from sigma0.config import ExitConfig

OWN_COURSE = OWN.with_name(RECORDED.name)


def course(
    model: Annotated[str, typer.Argument(help="Shipped name, or a folder of such a model.")] = "pocket-large",
    exit_config: ExitJson = "",
    out: Annotated[Path, typer.Option(help="Where to write it, as JSON.")] = OWN_COURSE,
) -> None:
    """Record at which loop each token of a shipped model's answers stops, and from which loop on it is settled."""
    with one_line_errors():
        found = record_course(model, ExitConfig.parse(json.loads(exit_config)) if exit_config else None)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(indent=1) + "\n")
    typer.echo(f"{described(found.trace, found.source)}; {len(found.exits)} tokens in {out}")
