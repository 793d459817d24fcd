"""What the tests of workers let workers do, a module that they can import, and a pool that starts none."""

import json
import os
import signal
from pathlib import Path

from sigma0.bench.core.workers import Pool


class Here(Pool):
    """A pool whose only worker is this process; what passes between them is JSON all the same."""

    def _each(self, function, items):
        for key, item in items.items():
            yield key, json.loads(json.dumps(function(json.loads(json.dumps(item)))))


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
