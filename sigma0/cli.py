"""The command line: the names of the commands, and where each is defined."""

import atexit
import gc
import logging
import os
import sys
from typing import Annotated

import typer

from sigma0 import __version__
from sigma0.commands.lazy_group import Target, lazy_group
from sigma0.registration import leave_out

# The help of each is the first line of its function's docstring, so that the list can be printed without importing it.
COMMANDS = {
    "generate": Target(
        "sigma0.commands.generate",
        "generate",
        "Continue a prompt; each token is coloured by the loop that it was read at, or with --ladder by its rung.",
    ),
    "chat": Target(
        "sigma0.commands.chat",
        "chat",
        "Talk with a model; each token is coloured by the loop that it was read at. /help lists the commands.",
    ),
    "calibrate": Target(
        "sigma0.commands.calibrate",
        "calibrate",
        "Turn a quality budget or a risk into thresholds, and store them in generation_config.json.",
    ),
    "solve": Target(
        "sigma0.commands.solve",
        "solve",
        "Solve a problem by an outer loop; the exit code is 0 if its own gate was passed, 1 if not.",
    ),
    "trail": Target(
        "sigma0.commands.trail",
        "trail",
        "Show the decisions of a ladder, each made again from what was recorded, or the course of an outer loop.",
    ),
    "serve": Target(
        "sigma0.serve.command", "serve", "Serve a model to OpenAI clients, and a page on which to watch it."
    ),
    "get": Target(
        "sigma0.commands.get",
        "get",
        "Write a model that does not ship as a checkpoint folder: smol-loop, which speaks English, or smollm2.",
    ),
    "size": Target(
        "sigma0.serve.size_command",
        "size",
        "Compute how many sequences fit into a memory beside the weights; nothing is loaded or measured.",
    ),
    "doctor": Target(
        "sigma0.commands.doctor", "doctor", "Print versions, devices, and what is installed or off, and why."
    ),
    "export": Target(
        "sigma0.commands.export",
        "export",
        "Write a folder that other tools load with trust_remote_code=True, through this package.",
    ),
}
app = typer.Typer(
    cls=lazy_group(COMMANDS),
    help="Looped language models with a depth of its own for each token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """Prints the version, and ends."""
    if wanted:
        typer.echo(f"sigma0 {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Takes the options of no command."""


def run() -> None:
    """Runs the command that a process was started for, and ends the process."""
    # Imports make objects by the hundred thousand that stay. Looking among them for garbage took a fifth of the start,
    # until `console.loading` is through; taking them down one by one, as long at the end.
    gc.disable()
    leave_out()
    status = 1

    def end() -> None:
        logging.shutdown()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            # what Python makes of it
            os._exit(status or 120)
        os._exit(status)

    # the first to be registered is the last to be called
    atexit.register(end)
    try:
        app()
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise


if __name__ == "__main__":
    run()
