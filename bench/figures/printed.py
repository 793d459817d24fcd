"""What commands print, for the texts that show it."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache


@cache
def printed(command: str) -> str:
    """What a `sigma0` command prints, run once."""
    return run_apart(shlex.split(command)[1:])


def run_apart(arguments: Sequence[str]) -> str:
    """What `sigma0` prints in a process of its own."""
    words = [sys.executable, "-m", "sigma0.cli", *arguments]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
