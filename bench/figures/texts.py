"""The generated parts of every text, beside which no line says a figure that was measured.

They are whole pages, blocks between `<!-- figures: NAME -->` and `<!-- end -->`, and what a `$ sigma0 ...` command
prints in a console fence.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sigma0.bench.figures.pages import pages
from sigma0.bench.figures.results import Results
from sigma0.bench.figures.tables import blocks

_BLOCK = re.compile(r"(?<=<!-- figures: )([^\n]*?) -->\n(.*?)(?=<!-- end -->)", re.DOTALL)
_CONSOLE = re.compile(r"(?<=^```console\n)\$ (sigma0 [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def texts(root: Path) -> list[str]:
    """The Markdown files of the repository, but those in folders that begin with a point."""
    result = subprocess.run(["git", "ls-files", "*.md"], cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(result.split())


def generated(root: Path) -> dict[str, str]:
    """Every text as it should be, by its path.

    Raises:
        ValueError: For a block that nothing generates, or that stands in no text.
    """
    results = Results(root)
    whole, parts = pages(results), blocks(results)
    old = {name: (root / name).read_text() for name in texts(root) if name not in whole}
    return whole | {name: rewritten(text, parts.get(name, {}), name) for name, text in old.items()}


def rewritten(text: str, parts: Mapping[str, str], name: str = "the text") -> str:
    """A text with its blocks and what its commands print as they should be."""
    stand = [match[1] for match in _BLOCK.finditer(text)]
    if sorted(stand) != sorted(parts):
        raise ValueError(f"blocks {sorted(stand)} stand in {name}, {sorted(parts)} are generated")
    text = _BLOCK.sub(lambda match: f"{match[1]} -->\n{parts[match[1]]}\n", text)
    return _CONSOLE.sub(lambda match: f"$ {match[1]}\n{printed(match[1])}```", text)


def changed(root: Path) -> dict[str, str]:
    """The texts that are not as they should be, and how they should be."""
    return {
        name: text
        for name, text in generated(root).items()
        if not (root / name).exists() or (root / name).read_text() != text
    }


@cache
def printed(command: str) -> str:
    """What a `sigma0` command prints, run once in a process of its own."""
    words = [sys.executable, "-m", "sigma0.cli", *shlex.split(command)[1:]]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip() + "\n"
