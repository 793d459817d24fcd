"""What commands print, for the texts that show it."""

import shlex
import subprocess
import sys
from functools import cache


@cache
def printed(command: str) -> str:
    """What a `sigma0` command prints, run once in a process of its own."""
    words = [sys.executable, "-m", "sigma0.cli", *shlex.split(command)[1:]]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
