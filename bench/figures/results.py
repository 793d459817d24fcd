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
from sigma0.bench.verdict.promise import PromiseReport
from sigma0.bench.verdict.worlds import WorldRow
from sigma0.calibrate.confidence import FeatureFigure

VERDICTS = ("pocket", "pocket-large")


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
        """The reports on verdicts, by model."""
        adapter = TypeAdapter(VerdictReport)
        return {name: adapter.validate_python(self.json(f"verdict-{name}")) for name in VERDICTS}

    @cached_property
    def promises(self) -> dict[str, PromiseReport]:
        """The simulations of calibrations, by model."""
        adapter = TypeAdapter(PromiseReport)
        return {name: adapter.validate_python(self.json(f"promise-{name}")) for name in VERDICTS}

    @cached_property
    def worlds(self) -> list[WorldRow]:
        """Calibrations of a risk in simulated worlds."""
        return TypeAdapter(list[WorldRow]).validate_python(self.json("calibration-worlds")["worlds"])

    def features(self, name: str) -> tuple[FeatureFigure, ...]:
        """What each feature was worth in the fit of a model's confidence."""
        return TypeAdapter(tuple[FeatureFigure, ...]).validate_python(self.json(f"doors-{name}")["features"])
