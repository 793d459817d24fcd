"""`python -m sigma0.bench soak`: half an hour of everything at once, and what is left of it."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigma0.bench.core.conditions import git_commit
from sigma0.bench.core.options import ReportFile
from sigma0.bench.pocket.prompts import micro_world
from sigma0.commands.console import one_line_errors, progress_bar
from sigma0.commands.options import AsJson, ModelArgument
from sigma0.errors import needs_extra

if TYPE_CHECKING:
    from sigma0.bench.serving.floods import Floods
    from sigma0.bench.serving.soak import Soak


def soak_server(
    model: ModelArgument = "pocket",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 30.0,
    clients: Annotated[int, typer.Option(min=1, help="How many ask at once.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the longest answers.")] = 48,
    floods: Annotated[
        int, typer.Option(min=0, help="How many flood beside them: prompts of 1 MB, requests left, half bodies.")
    ] = 6,
    kv_memory: Annotated[
        str, typer.Option(help="K/V of the server; little, so that requests are put back.")
    ] = "2560KiB",
    out: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with clients of all kinds, one in ten of which leave in the middle; then end it under load."""
    with one_line_errors(), needs_extra("bench"), ExitStack() as stack:
        from sigma0.bench.serving.servers import serving_process
        from sigma0.bench.serving.soak import soak

        prompts = [str(prompt.content) for prompt in micro_world(60) if isinstance(prompt.content, str)]
        arguments = ["--dtype", "float32", "--threads", "1", "--kv-memory", kv_memory, "--max-running", "8"]
        process, url = stack.enter_context(serving_process(model, arguments))
        advance = stack.enter_context(progress_bar("seconds", int(60 * minutes), hidden=as_json))
        name, seconds = Path(model).name, 60 * minutes
        found = asyncio.run(soak(process, url, name, prompts, seconds, clients, max_tokens, floods, advance))
    told = {"model": model, "kv_memory": kv_memory, "commit": git_commit(), **found.to_dict()}
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(told))
    else:
        for line in lines_of(found):
            typer.echo(line)
    if not is_sound(found):
        raise typer.Exit(1)


def is_sound(found: "Soak") -> bool:
    """Whether every request was answered once and rightly, nothing was left on the server, and memory stayed flat."""
    last = found.samples[-1]
    left = last.pages_used + last.running + last.waiting
    faults = found.wrong + found.answered_twice + sum(found.broken.values()) + found.lost_after_term
    faults += 0 if found.floods is None else sum(found.floods.broken.values())
    return not left and not faults and found.exit_code == 0 and found.memory_is_flat is not False


def lines_of(found: "Soak") -> list[str]:
    """The result in words."""
    early, late = found.memory_mb
    flat = {True: "flat", False: "not flat", None: "too short a load to judge"}[found.memory_is_flat]
    beside = [] if found.floods is None else [_line_of(found.floods)]
    return [
        f"{found.asked} requests in {found.seconds:g} s from {found.clients} clients: {found.answered} answered, "
        f"{found.left} left by their clients, {found.refused} refused by the full queue",
        f"wrong {found.wrong}, answered twice {found.answered_twice}, broken {dict(found.broken)}",
        f"{found.tokens} tokens, {found.preemptions} requests put back; "
        f"{found.samples[-1].pages_used} pages held at rest",
        f"memory {early:.1f} MB in the second tenth, {late:.1f} MB in the last: {flat}",
        f"SIGTERM under load: {found.finished_after_term} finished, {found.lost_after_term} lost, "
        f"exit code {found.exit_code}",
        *beside,
    ]


def _line_of(floods: "Floods") -> str:
    medians = " and ".join(
        "none" if each is None else f"{each:.0f} ms" for each in (floods.median_ms_without, floods.median_ms_with)
    )
    return (
        f"floods of {floods.clients} clients, half of the time: refused {dict(floods.refused)}, {floods.left} left, "
        f"{floods.half_sent} half sent, broken {dict(floods.broken)}; another client's median without and with them: "
        f"{medians}"
    )
