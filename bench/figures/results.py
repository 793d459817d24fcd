"""The committed results that texts quote, read once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from sigma0.bench.core.conditions import Provenance, read_report, short_commit, stale_mark
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.core.rows import AnyRow
from sigma0.bench.verdict.measure import VerdictReport
from sigma0.bench.verdict.promise import PromiseReport
from sigma0.calibrate.confidence import FeatureFigure

T = TypeVar("T")
VERDICTS = ("pocket", "pocket-large")


def current(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Rows but those of a model's former weights, where their benchmark has such runs of the weights that ship.

    Outer loops have a larger model beside a small one: of them, runs are of one kind that begin with the same model and
    ask the same questions.
    """
    begun: dict[str, str] = {}
    kinds = [
        (row.benchmark, row.model, row.prompts, begun.setdefault(row.time, row.model))
        if row.benchmark == "outer"
        else (row.benchmark, row.model)
        for row in rows
    ]
    stale = [bool(stale_mark({row.model: row.model_sha256})) for row in rows]
    measured = {kind for kind, old in zip(kinds, stale, strict=True) if not old}
    return [row for row, kind, old in zip(rows, kinds, stale, strict=True) if not (old and kind in measured)]


@dataclass(frozen=True)
class Results:
    """Rows and reports under a repository's `bench/results`."""

    root: Path  # The repository

    @cached_property
    def rows(self) -> list[AnyRow]:
        """The ledger, of a model's former weights only what has not been measured again."""
        return current(read_rows(self.root / "bench" / "results" / "leaderboard.jsonl"))

    def json(self, name: str) -> Any:
        """One report as it was written."""
        return self._read(name)[1]

    def made(self, *names: str) -> str:
        """What reports were made with, in a sentence; which of their models ship with other weights now."""
        result = [self._read(name)[0] for name in names]
        commits = ", ".join(dict.fromkeys(short_commit(item.commit) for item in result))
        devices = ", ".join(dict.fromkeys(item.device for item in result))
        threads = ", ".join(dict.fromkeys(str(item.threads) for item in result))
        versions = ", ".join(
            dict.fromkeys(f"{name} {output}" for item in result for name, output in item.versions.items())
        )
        notes = "".join(f" {note}" for note in dict.fromkeys(item.note for item in result) if note)
        return f"Made by commit {commits} on {devices}, {threads} thread(s), {versions}{self.stale(*names)}.{notes}"

    def stale(self, *names: str) -> str:
        """Which models of some reports ship with other weights now, as `stale_mark` tells it."""
        result = [self._read(name)[0] for name in names]
        return stale_mark({name: output.weights_sha256 for item in result for name, output in item.models.items()})

    def prompts_of(self, name: str) -> str:
        """The command that made the prompts which a report was found on."""
        return self._read(name)[0].command.partition(" > ")[0]

    def _read(self, name: str) -> tuple[Provenance, Any]:
        return read_report(self.root / "bench" / "results" / f"{name}.json")

    @cached_property
    def gpu(self) -> Any:
        """What the last GPU told beside the ledger's rows."""
        return json.loads((self.root / "bench" / "gpu" / "h200.json").read_text())

    def typed(self, kind: type[T], name: str) -> T:
        """A report as what it was made of."""
        return TypeAdapter(kind).validate_python(self.json(name))

    @cached_property
    def verdicts(self) -> dict[str, VerdictReport]:
        """The reports on verdicts, by model."""
        return {name: self.typed(VerdictReport, f"verdict-{name}") for name in VERDICTS}

    @cached_property
    def promises(self) -> dict[str, PromiseReport]:
        """The simulations of calibrations, by model."""
        return {name: self.typed(PromiseReport, f"promise-{name}") for name in VERDICTS}

    def features(self, name: str) -> tuple[FeatureFigure, ...]:
        """What each feature was worth in the fit of a model's confidence."""
        return TypeAdapter(tuple[FeatureFigure, ...]).validate_python(self.json(f"doors-{name}")["features"])
