"""Samples in a file, one JSON line each: a run is resumed from them, and can be judged later."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.core.lines import append, cut, parsed
from sigma0.bench.humaneval.problems import Problem
from sigma0.bench.humaneval.sampling import Sample, SampleSettings


class Run(BaseModel):
    """What was asked for at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["run"] = "run"  # "run"
    conditions: Conditions  # Model, machine and code
    settings: SampleSettings  # Of all its samples
    samples: int = Field(ge=1)  # Of each problem

    @property
    def id(self) -> str:
        """A short name."""
        unnamed = {"conditions": self.conditions.unnamed}
        return sha256(self.model_dump_json(exclude=unnamed).encode()).hexdigest()[:16]

    @property
    def maker(self) -> str:
        """What its samples depend on beside their problems and numbers: weights, the model's other files, settings."""
        told = [self.conditions.model_sha256, self.conditions.settings_sha256, self.settings.model_dump(mode="json")]
        return json.dumps(told, sort_keys=True)


class SavedSample(BaseModel):
    """A sample, and the run that wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["sample"] = "sample"  # "sample"
    run: str  # `Run.id`
    sample: Sample  # It


_LINE: TypeAdapter[Run | SavedSample] = TypeAdapter(Annotated[Run | SavedSample, Field(discriminator="kind")])


class SampleFile:
    """Samples of any number of runs, by what made them; runs of one maker share theirs.

    Args:
        path: The file; made where it is missing. A last line that was not written to its end is cut off. None keeps
            the samples in memory alone.

    Raises:
        ValueError: If the file holds a line that is none of these, or a sample of a run that stands nowhere before it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._runs: dict[str, Run] = {}
        self._saved: dict[tuple[str, str, int], SavedSample] = {}
        if path is not None:
            cut(path)
            parsed(path, lambda line: self._take(_LINE.validate_json(line)), "run and no sample")

    @property
    def latest(self) -> list[Run]:
        """The last run of each maker."""
        return list({run.maker: run for run in self._runs.values()}.values())

    def begin(self, run: Run) -> None:
        """Makes a run known."""
        if run.id not in self._runs:
            self._put(run)

    def add(self, run: Run, sample: Sample) -> None:
        """Keeps a sample of a run that is known."""
        self._put(SavedSample(run=run.id, sample=sample))

    def find(self, run: Run, problem: Problem, number: int) -> Sample | None:
        """The sample that the run's maker wrote before; None where it did not."""
        found = self._saved.get((run.maker, problem.digest, number))
        return None if found is None else found.sample

    def all_of(self, run: Run, problems: list[Problem]) -> list[list[Sample]]:
        """The samples of a run, for each of its problems.

        Raises:
            ValueError: If some are missing.
        """
        found = [[self.find(run, problem, number) for number in range(run.samples)] for problem in problems]
        whole = [[sample for sample in row if sample is not None] for row in found]
        there, needed = sum(map(len, whole)), run.conditions.n * run.samples
        if there < needed:
            raise ValueError(
                f"{there} of {needed} samples of {run.conditions.model} are there for these problems: write the rest "
                "first, with the same command and --out-samples"
            )
        return whole

    def commits(self, run: Run, problems: list[Problem]) -> tuple[str | None, ...]:
        """Of the code that wrote the samples of a run, each once."""
        keys = [(run.maker, problem.digest, number) for problem in problems for number in range(run.samples)]
        written = (self._runs[self._saved[key].run].conditions.commit for key in keys)
        return tuple(dict.fromkeys(written))

    def _put(self, line: Run | SavedSample) -> None:
        self._take(line)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line.model_dump_json().encode())

    def _take(self, line: Run | SavedSample) -> None:
        if isinstance(line, Run):
            self._runs[line.id] = line
            return
        if line.run not in self._runs:
            raise ValueError(f"run {line.run!r} stands nowhere before its sample")
        key = (self._runs[line.run].maker, line.sample.problem_sha256, line.sample.number)
        self._saved.setdefault(key, line)
