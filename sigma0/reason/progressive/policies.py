"""When verification may rise a level: six policies as one form, stages with gates, and their named settings.

A stage is left for the next when all of its gates are passed, and the last one ends the run well:

    schedule    at least `until` verifications were made in all: `until` - 1 is the iteration, from 0, that judges first
    passes      the last `passes` verifications at this stage passed
    stay        at least `at_least` verifications were made at this stage

| policy | gates |
|---|---|
| A `iteration_schedule` | the schedule alone, and 5 passes at the end |
| B `success_based` | passes alone |
| C `dual_track` | as A, with a schedule of its own for generation |
| D `multi_stage` | passes, within a number of verifications for each stage |
| E `hybrid` | schedule, passes and stay |
| F `flat high` | none: every verification is at high effort, and 5 passes end the run |
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from sigma0.errors import one_line

Level = Literal["low", "medium", "high"]
LEVELS: tuple[Level, ...] = get_args(Level)
VARIABLE = "SIGMA0_PROGRESSIVE_CONFIG"
_CHECKED = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=0, strict=True)]
_Positive = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, config=_CHECKED)
class Stage:
    """A level of verification, and what leads out of it."""

    level: Level  # Effort of the verifications
    passes: _Count  # Consecutive passes that are asked for; 0 asks for none
    until: _Count = 0  # Verifications in all that must have been made; of no meaning for the last stage
    at_least: _Count = 0  # Verifications at this stage that must have been made
    # Verifications at this stage after which the run ends unsolved; None sets no limit
    at_most: _Positive | None = None


@dataclass(frozen=True, config=_CHECKED)
class Rise:
    """The level of generation from some iteration on."""

    iteration: _Count  # From 0
    level: Level  # From there on


@dataclass(frozen=True, config=_CHECKED)
class ProgressiveConfig:
    """A policy.

    Attributes:
        policy: Its name, as reports show it.
        stages: The cheapest first; levels never fall from one to the next, nor leave one out.
        generation: Levels of generation; by default low throughout.
        max_iterations: Verifications at most.
        max_errors: Consecutive failures at most.
        skip: Whether stages are left out whose schedule is over when one before them is left.
        lower_after: Consecutive failures after which verification falls back a stage; None: it never does.
    """

    policy: str
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    generation: Annotated[tuple[Rise, ...], Field(min_length=1)] = (Rise(0, "low"),)
    max_iterations: _Positive = 30
    max_errors: _Positive = 10
    skip: bool = False
    lower_after: _Positive | None = None

    @model_validator(mode="after")
    def _rises(self) -> "ProgressiveConfig":
        levels = [LEVELS.index(stage.level) for stage in self.stages]
        if any(not 0 <= later - earlier <= 1 for earlier, later in pairwise(levels)):
            named = ", ".join(stage.level for stage in self.stages)
            raise ValueError(f"stages rise by one level at a time at most, got {named}")
        if self.stages[-1].passes < 1:
            raise ValueError("the last stage must ask for at least one pass, or nothing would ever be verified")
        begins = [rise.iteration for rise in self.generation]
        if begins[0] != 0 or begins != sorted(set(begins)):
            raise ValueError(f"levels of generation begin at iteration 0 and later ones at later ones, got {begins}")
        return self

    def generation_level(self, iteration: int) -> Level:
        """The effort that solutions are written with at an iteration."""
        return [rise.level for rise in self.generation if rise.iteration <= iteration][-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ProgressiveConfig":
        """A policy from JSON.

        Raises:
            ValueError: For unknown keys or bad values, naming them.
        """
        try:
            return TypeAdapter(cls).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"progressive config: {one_line(error)}") from error


def _hybrid(
    name: str, judged_at: tuple[int, int], passes: tuple[int, int, int], stay: int, iterations: int, errors: int
) -> ProgressiveConfig:
    """A hybrid policy whose gates are judged at some iterations, counted from 0, and at each one after.

    Iteration 5 is the sixth verification, so six were made when a gate is first judged there.
    """
    ends = (*(iteration + 1 for iteration in judged_at), 0)
    stages = tuple(Stage(level, passes[place], ends[place], stay) for place, level in enumerate(LEVELS))
    return ProgressiveConfig(name, stages, max_iterations=iterations, max_errors=errors)


ITERATION_SCHEDULE = ProgressiveConfig(
    "iteration_schedule", (Stage("low", 0, until=5), Stage("medium", 0, until=10), Stage("high", 5))
)
SUCCESS_BASED = ProgressiveConfig("success_based", (Stage("low", 3), Stage("medium", 3), Stage("high", 5)))
DUAL_TRACK = ProgressiveConfig(
    "dual_track",
    (Stage("low", 0, until=3), Stage("medium", 0, until=8), Stage("high", 5)),
    generation=(Rise(0, "low"), Rise(15, "medium"), Rise(25, "high")),
)
MULTI_STAGE = ProgressiveConfig(
    "multi_stage",
    (
        Stage("low", 2, at_most=10),
        Stage("medium", 3, at_most=10),
        Stage("high", 3, at_most=15),
        Stage("high", 5, at_most=10),
    ),
    max_iterations=45,
)
HYBRID_DEFAULT = _hybrid("hybrid", (5, 12), (2, 2, 5), 3, 30, 10)
CONSERVATIVE = _hybrid("hybrid conservative", (8, 16), (3, 3, 5), 5, 35, 12)
AGGRESSIVE = _hybrid("hybrid aggressive", (3, 8), (1, 2, 5), 2, 25, 10)
FAST_TEST = _hybrid("hybrid fast test", (2, 4), (1, 1, 3), 1, 15, 8)
FLAT_HIGH = ProgressiveConfig("flat high", (Stage("high", 5),))

PRESETS: dict[str, ProgressiveConfig] = {
    "ITERATION_SCHEDULE": ITERATION_SCHEDULE,
    "SUCCESS_BASED": SUCCESS_BASED,
    "DUAL_TRACK": DUAL_TRACK,
    "MULTI_STAGE": MULTI_STAGE,
    "HYBRID_DEFAULT": HYBRID_DEFAULT,
    "FLAT_HIGH": FLAT_HIGH,
    "CONSERVATIVE": CONSERVATIVE,
    "AGGRESSIVE": AGGRESSIVE,
    "FAST_TEST": FAST_TEST,
}
_LETTERS = dict(zip("ABCDEF", PRESETS, strict=False))


def named_config(name: str) -> ProgressiveConfig:
    """A policy by its name, its letter, or the JSON file that holds it.

    Args:
        name: One of `PRESETS` in any case, A to F, or a file whose name ends in `.json`.

    Raises:
        ValueError: If there is no such policy.
    """
    known = name.strip().upper().replace("-", "_")
    if known in _LETTERS or known in PRESETS:
        return PRESETS[_LETTERS.get(known, known)]
    if name.endswith(".json"):
        try:
            value = json.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"progressive config {name!r} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"progressive config {name!r} holds no JSON object")
        return ProgressiveConfig.from_dict(value)
    raise ValueError(
        f"no such progressive config: {name!r}; there are {', '.join(PRESETS)}, A to F, or a file ending in .json"
    )


def chosen_config() -> ProgressiveConfig:
    """The policy that the variable SIGMA0_PROGRESSIVE_CONFIG names; flat high effort by default."""
    return named_config(os.environ.get(VARIABLE) or "FLAT_HIGH")
