"""`sigma0 generate` without a prompt: what the model knows, and prompts that it answers."""

import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from sigma0.checkpoints import CHECKPOINTS, resolve_model, shipped_models
from sigma0.checkpoints.about import About, read_about

NO_PROMPT = "no prompt: give a text, or - to read it from standard input"


def about_model(model: str) -> tuple[str, About | None]:
    """The short name of a shipped name, folder or hub id, and what its checkpoint says of itself."""
    if model in shipped_models():
        return model, read_about(CHECKPOINTS / model)
    source = resolve_model(model)
    return Path(source).name, read_about(source)


def show_examples(model: str) -> None:
    """Prints example prompts as command lines, each with the answer that belongs to it.

    Then it is an error that there is no prompt, but at a terminal: it may have been meant to come from standard input.
    """
    name, about = about_model(model)
    if about is None or not about.examples:
        raise ValueError(f"{NO_PROMPT}; {name} ships no examples")
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{name} knows {about.knows}. Examples:"))
    option = "" if model == "pocket" else f"--model {shlex.quote(model)} "
    option += "--chat " if about.is_chat else ""
    for example in about.examples:
        console.print()
        console.print(Text(f"sigma0 generate {option}{shlex.quote(example.prompt)}"))
        console.print(Text(f"  {example.answer}", style="dim"))
    if not sys.stdin.isatty():
        raise ValueError(NO_PROMPT)
