"""The committed results that texts quote, read once."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sigma0.bench.core.ledger import AnyRow, read_rows
from sigma0.bench.effort.report import EffortReport
from sigma0.bench.verdict.measure import VerdictReport

VERDICTS = {
    "pocket": "verdict-pocket",
    "pocket-large": "verdict-pocket-large",
    "pocket-large, margin, hard half": "verdict-pocket-large-margin-hard",
}


@dataclass(frozen=True)
class Results:
    """Rows and reports under a repository's `bench/results`.

    Attributes:
        root: The repository.
    """

    root: Path

    @cached_property
    def rows(self) -> list[AnyRow]:
        """The ledger."""
        return read_rows(self.root / "bench" / "results" / "leaderboard.jsonl")

    def json(self, name: str) -> Any:
        """One report as it was written."""
        return json.loads((self.root / "bench" / "results" / f"{name}.json").read_text())

    def effort(self, name: str) -> EffortReport:
        """A report on policies of effort."""
        return TypeAdapter(EffortReport).validate_python(self.json(f"effort-{name}"))

    @cached_property
    def verdicts(self) -> dict[str, VerdictReport]:
        """The reports on verdicts, by the name that tables give them."""
        told = {name: self.json(file) for name, file in VERDICTS.items()}
        adapter = TypeAdapter(VerdictReport)
        return {
            name: adapter.validate_python({key: value for key, value in each.items() if key != "hard_half_only"})
            for name, each in told.items()
        }
