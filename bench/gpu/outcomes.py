"""What has been measured, kept in a file that a later call goes on with."""

import json
from pathlib import Path
from typing import Any

from sigma0.bench.core.lines import alone, append
from sigma0.bench.gpu.parts import Part


class Outcomes:
    """How parts began and ended, in `done.jsonl` of a folder: lines of `key`, `part`, `state`, `seconds` and `why`.

    Args:
        folder: Of the results; made with the first line.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "done.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """All lines so far, but for a last one that a killed process left without its end."""
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def add(self, part: Part, state: str, seconds: float = 0.0, why: str = "") -> None:
        """Keeps that a part `began`, or that it is `done`, `failed` or was `stopped`."""
        told = {"key": _key(part), "part": part.name, "state": state, "seconds": seconds, "why": why}
        with alone(self._path):
            append(self._path, json.dumps(told).encode())

    def done(self, part: Part) -> bool:
        """Whether a part has ended well, with these arguments."""
        return any(line["state"] == "done" and line["key"] == _key(part) for line in self.lines())

    def tried(self, part: Part) -> bool:
        """Whether a part has begun."""
        return any(line["key"] == _key(part) for line in self.lines())


def _key(part: Part) -> str:
    return json.dumps([part.name, part.function, part.arguments], default=str)
