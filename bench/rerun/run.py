"""A recipe run in a process of its own, and what it reported."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigma0.bench.rerun.recipes import Recipe
from sigma0.bench.rerun.rows import untimed

# of this very Python, whatever `sigma0` is found first
_COMMAND_LINE = "from sigma0.cli import app; app()"


class Failed(ValueError):
    """A command that ended in an error, or printed no report."""


def told(recipe: Recipe, quick: bool) -> str:
    """What a reader types to have it again, names in braces as they are."""
    typed = recipe.command if recipe.command.startswith("sigma0 ") else f"python -m {recipe.command}"
    command = f"{typed}{f' {recipe.quick}' if quick and recipe.quick else ''}"
    prompts = shlex.join(_prompts(recipe, quick))
    return f"python -m {prompts} > {{prompts}} && {command}" if recipe.prompts else command


def run(recipe: Recipe, quick: bool, inputs: Mapping[str, Path], scratch: Path) -> Any:
    """Runs a recipe and gives its report, plain JSON values, or the text of a trail.

    Args:
        recipe: What is run.
        quick: Its quick part alone.
        inputs: Where the files are that it reads.
        scratch: An empty folder for what it writes on the way.

    Raises:
        Failed: Naming the command and the end of what it printed.
        ValueError: For an input that is not given.
    """
    files = {f"{{{name}}}": str(path.resolve()) for name, path in recipe.given(inputs).items()}
    files["{scratch}"] = str(scratch)
    if recipe.prompts:
        prompts = scratch / "prompts.jsonl"
        _run(_prompts(recipe, quick), prompts)
        files["{prompts}"] = str(prompts)
    command = [_filled(each, files) for each in recipe.words(quick)]
    printed = scratch / "printed"
    report = scratch / f"report{recipe.ending}" if recipe.file else printed
    _run([*command, recipe.file, str(report)] if recipe.file else command, printed)
    try:
        if recipe.ending == ".jsonl":
            return report.read_text()
        if recipe.rows:
            return [untimed(line) for line in report.read_text().splitlines()]
        return json.loads(report.read_text())
    except (json.JSONDecodeError, OSError) as error:
        raise Failed(f"{shlex.join(command)} gave no report: {error}") from error


def _prompts(recipe: Recipe, quick: bool) -> list[str]:
    drawn = recipe.quick_prompts if quick and recipe.quick_prompts else recipe.prompts
    return ["sigma0.bench.pocket", "prompts", *shlex.split(drawn)]


def _filled(word: str, files: Mapping[str, str]) -> str:
    for name, path in files.items():
        word = word.replace(name, path)
    return word


def _run(command: Sequence[str], out: Path) -> None:
    module = ["-c", _COMMAND_LINE, *command[1:]] if command[0] == "sigma0" else ["-m", *command]
    with out.open("w") as file:
        ended = subprocess.run([sys.executable, *module], stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        last = "\n".join(ended.stderr.strip().splitlines()[-5:])
        raise Failed(f"{shlex.join(command)} ended with {ended.returncode}: {last}")
