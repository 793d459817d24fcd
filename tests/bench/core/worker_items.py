"""What the tests of workers let workers do: a module that they can import."""

import os
import signal
from pathlib import Path


def logged(item):
    """Twice the number; each call leaves a line."""
    with Path(item["log"]).open("a") as file:
        file.write(f"{item['number']}\n")
    if item.get("fails"):
        raise ValueError(f"{item['number']} is no good")
    if item.get("dies") and not Path(item["dies"]).exists():
        if item["dies_once"]:
            Path(item["dies"]).write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"twice": 2 * item["number"], "third": item["number"] / 3, "pid": os.getpid()}
