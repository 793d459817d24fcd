"""Rows about the tests: how many small faults they notice."""

import json
from hashlib import sha256
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator


class MutationScore(BaseModel):
    """What became of the mutants of one folder.

    Attributes:
        killed: A test failed, or the tests ran out of their time.
        by_time: Of these, those that ran out of it.
        survived: No test failed, those with a reason why none can left out.
        equivalent: No test failed, and none can: a reason is given.
        not_reached: The time of the run was over before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    killed: NonNegativeInt = 0
    by_time: NonNegativeInt = 0
    survived: NonNegativeInt = 0
    equivalent: NonNegativeInt = 0
    not_reached: NonNegativeInt = 0

    @property
    def share(self) -> float | None:
        """Of those that can be killed and were reached, the share that was; None where there is none."""
        tried = self.killed + self.survived
        return self.killed / tried if tried else None

    def __add__(self, other: "MutationScore") -> "MutationScore":
        return MutationScore(**{name: getattr(self, name) + getattr(other, name) for name in type(self).model_fields})


class Survivor(BaseModel):
    """A mutant that no test noticed.

    Attributes:
        file: The source.
        line: Of the change.
        before: The line as it was.
        after: As it is.
        tests: How many tests ran it; 0 where no fast test runs the line.
        reason: Why no test can notice it; None where none is known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    line: int
    before: str
    after: str
    tests: int
    reason: str | None


class MutationRow(BaseModel):
    """A sample of mutants under the fast tests.

    Attributes:
        benchmark: "mutants".
        time: When the run ended, ISO 8601, UTC.
        commit: As in `Conditions`, as are the next two.
        device: Device type and the processor's name.
        versions: Of Python and of the libraries that tests and mutants come from.
        seed: Of the draw.
        n: How many mutants were asked for.
        minutes: That the run was given.
        most_seconds: Of tests, as they were timed before, that a mutant was run against; the nearest first.
        folders: What became of the mutants by folder.
        survivors: All that survived, with those that are equivalent.

    Raises:
        ValueError: If there are not as many survivors, with a reason and without, as the folders count.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    benchmark: Literal["mutants"] = "mutants"
    time: str
    commit: str | None
    device: str
    versions: dict[str, str]
    seed: int
    n: int
    minutes: float
    most_seconds: float
    folders: dict[str, MutationScore]
    survivors: tuple[Survivor, ...]

    @model_validator(mode="after")
    def _counts_what_is_listed(self) -> "MutationRow":
        excused = sum(survivor.reason is not None for survivor in self.survivors)
        listed, counted = (len(self.survivors) - excused, excused), (self.whole.survived, self.whole.equivalent)
        if listed != counted:
            raise ValueError(f"survivors and equivalent ones are {listed} by the list and {counted} by the counts")
        return self

    @property
    def whole(self) -> MutationScore:
        """Of all folders."""
        return sum(self.folders.values(), MutationScore())

    @property
    def run(self) -> str:
        """A short name for the conditions."""
        conditions = [self.commit, self.device, self.versions, self.minutes, self.most_seconds]
        return sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """What makes two rows measurements of the same thing: another run is another measurement."""
        return json.dumps([self.benchmark, self.time, self.seed, self.n])
