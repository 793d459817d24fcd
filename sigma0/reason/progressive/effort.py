"""Progressive verification effort: which effort the next verification has, and whether the run is over."""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from sigma0.errors import one_line
from sigma0.reason.progressive.policies import LEVELS, Level, ProgressiveConfig, Stage, chosen_config, named_config

TaskType = Literal["generation", "verification"]
Limit = Literal["max_iterations", "max_errors", "stage_iterations"]
# verifications that a report shows, and that are kept
RECENT = 20
_Count = Annotated[int, Field(ge=0, strict=True)]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Transition:
    """A move between stages.

    Attributes:
        iteration: Index of the verification that led to it.
        stage: The stage that was left, from 0.
        to_stage: The one that was reached.
        level: Level before.
        to_level: Level since.
    """

    iteration: _Count
    stage: _Count
    to_stage: _Count
    level: Level
    to_level: Level


@checked(config=ConfigDict(extra="forbid"))
class _State:
    """What a manager knows; see `ProgressiveReasoningManager.get_status`."""

    iteration: _Count = 0
    stage: _Count = 0
    streak: _Count = 0
    failures: _Count = 0
    at_stage: _Count = 0
    transitions: list[Transition] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)


class ProgressiveReasoningManager:
    """Raises the effort of verification by schedule and by evidence; generation stays cheap.

    It decides, and refuses nothing: limits are reported by `get_status`, and whoever runs the loop keeps them.

    Args:
        config: A policy, or the name of one; by default as SIGMA0_PROGRESSIVE_CONFIG says.

    Raises:
        ValueError: For an unknown name.
    """

    def __init__(self, config: ProgressiveConfig | str | None = None) -> None:
        if config is None:
            config = chosen_config()
        self.config = named_config(config) if isinstance(config, str) else config
        self._state = _State()

    def get_reasoning_effort(self, task_type: str) -> Level:
        """The effort of what comes next.

        Args:
            task_type: `generation` or `verification`.

        Raises:
            ValueError: For another one.
        """
        if task_type == "verification":
            return self._stage.level
        if task_type == "generation":
            return self.config.generation_level(self._state.iteration)
        raise ValueError(f"no such task type: {task_type!r}; there are generation and verification")

    def update_after_verification(self, passed: bool) -> dict[str, Any]:
        """Takes in how a verification went.

        The streak of passes starts again on a failure and on a new stage, and one update moves one stage at most
        unless the policy skips.

        Args:
            passed: Whether it passed.

        Returns:
            `iteration`: index of this verification, from 0; `verification_level`: that the next one will use; `passed`;
            `consecutive_passes`: the streak as it stands now; `level_upgraded`; `success`: whether the last stage has
            the passes that it asks for.
        """
        state = self._state
        index, before = state.iteration, self._stage.level
        state.iteration += 1
        state.at_stage += 1
        state.streak = state.streak + 1 if passed else 0
        state.failures = 0 if passed else state.failures + 1
        self._move(index)
        result = {
            "iteration": index,
            "verification_level": self._stage.level,
            "passed": passed,
            "consecutive_passes": state.streak,
            "level_upgraded": _rank(self._stage.level) > _rank(before),
            "success": self._succeeded,
        }
        state.recent = [*state.recent, result][-RECENT:]
        return dict(result)

    def get_status(self) -> dict[str, Any]:
        """Where the run stands.

        Returns:
            `policy`; `iteration`: verifications made; `stage`, `stages`; `verification_level`, `generation_level`;
            `consecutive_passes`, `required_passes`; `iterations_at_stage`; `consecutive_failures`; `waits_for`: the
            gates that are still shut; `transitions`; `recent`; `success`; `limit`: the limit that was reached, or None;
            `finished`: either of both.
        """
        state, stage = self._state, self._stage
        limit = None if self._succeeded else self._limit
        return {
            "policy": self.config.policy,
            "iteration": state.iteration,
            "stage": state.stage,
            "stages": len(self.config.stages),
            "verification_level": stage.level,
            "generation_level": self.get_reasoning_effort("generation"),
            "consecutive_passes": state.streak,
            "required_passes": stage.passes,
            "iterations_at_stage": state.at_stage,
            "consecutive_failures": state.failures,
            "waits_for": self._shut(),
            "transitions": [asdict(entry) for entry in state.transitions],
            "recent": [dict(entry) for entry in state.recent],
            "success": self._succeeded,
            "limit": limit,
            "finished": self._succeeded or limit is not None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Policy and state as plain JSON values."""
        return {"config": self.config.to_dict(), "state": asdict(self._state)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ProgressiveReasoningManager":
        """A manager that goes on where another one stood.

        Raises:
            ValueError: For unknown keys or bad values, naming them.
        """
        if set(value) != {"config", "state"}:
            raise ValueError(f"progressive state holds config and state, got {', '.join(sorted(map(str, value)))}")
        manager = cls(ProgressiveConfig.from_dict(value["config"]))
        try:
            state = TypeAdapter(_State).validate_python(value["state"])
        except ValidationError as error:
            raise ValueError(f"progressive state: {one_line(error)}") from error
        if state.stage >= len(manager.config.stages):
            raise ValueError(f"progressive state: stage {state.stage} of {len(manager.config.stages)}")
        manager._state = state
        return manager

    @property
    def _stage(self) -> Stage:
        return self.config.stages[self._state.stage]

    @property
    def _is_last(self) -> bool:
        return self._state.stage + 1 == len(self.config.stages)

    @property
    def _succeeded(self) -> bool:
        return self._is_last and not self._shut()

    @property
    def _limit(self) -> Limit | None:
        if self._state.iteration >= self.config.max_iterations:
            return "max_iterations"
        if self._state.failures >= self.config.max_errors:
            return "max_errors"
        at_most = self._stage.at_most
        return "stage_iterations" if at_most is not None and self._state.at_stage >= at_most else None

    def _shut(self) -> list[str]:
        """The gates out of this stage that are shut, in words."""
        state, stage = self._state, self._stage
        obstacles = []
        if not self._is_last and state.iteration < stage.until:
            obstacles.append(f"iteration {stage.until - 1}")
        if state.streak < stage.passes:
            obstacles.append(f"{stage.passes - state.streak} more passes in a row")
        if state.at_stage < stage.at_least:
            obstacles.append(f"{stage.at_least - state.at_stage} more verifications at this stage")
        return obstacles

    def _move(self, index: int) -> None:
        """Goes on to the next stage if every gate is open, or back one where the policy says so."""
        state, lower_after = self._state, self.config.lower_after
        target = state.stage
        if not self._is_last and not self._shut():
            target += 1
            while self.config.skip and target + 1 < len(self.config.stages) and self._is_over(target):
                target += 1
        elif lower_after is not None and state.failures and state.failures % lower_after == 0:
            target = max(0, target - 1)
        if target != state.stage:
            levels = (self._stage.level, self.config.stages[target].level)
            state.transitions = [*state.transitions, Transition(index, state.stage, target, *levels)]
            state.stage, state.streak, state.at_stage = target, 0, 0

    def _is_over(self, stage: int) -> bool:
        """Whether the schedule has passed a stage by."""
        return 0 < self.config.stages[stage].until <= self._state.iteration


def _rank(level: Level) -> int:
    return LEVELS.index(level)
