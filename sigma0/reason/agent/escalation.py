"""When an agent counts as stuck, and what is then done about it.

Tests are looked at every `check_interval` steps (a check) and whenever they are run. What they say is held against the
best that was seen since the last clean slate, the *slate*; steps count from its beginning.

| tier | at a check | what is done |
|---|---|---|
| 0 to 1 | at step >= `tier1`, with `patience` stuck checks | `replan`: a new plan under another strategy |
| 1 to 2 | at step >= `tier2`, still stuck | `warn`: a last warning, fewer tools, more model |
| 2 to 3 | at step >= `tier3`, still stuck | `reset`: workspace as at first, a new slate at tier 0 |
| any to one lower | none: when progress is seen | `lower`: tools and model go back to those of that tier |

A check goes up by one tier at most, so each is tried before the next. A tier acts when it is reached, which is once in
a slate unless progress lowered it and it is reached again. At the last step nothing is done: none would be left for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as checked

from sigma0.reason.agent.reports import TestReport

Measure = Literal["replan", "warn", "reset"]
MEASURES: tuple[Measure, ...] = ("replan", "warn", "reset")
Positive = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
_STRICT = ConfigDict(extra="forbid")


@checked(frozen=True, config=_STRICT)
class ThreeTierEscalation:
    """When the tiers act; see the module's table.

    Attributes:
        tier1: Step of a slate from which on tier 1 may act.
        tier2: Likewise, above `tier1`.
        tier3: Likewise, above `tier2`.
        check_interval: Steps from check to check.
        max_steps: Steps of a run at most, those of all slates together.
        patience: Stuck checks that make an agent stuck.
    """

    tier1: Positive = 15
    tier2: Positive = 30
    tier3: Positive = 45
    check_interval: Positive = 5
    max_steps: Positive = 60
    patience: Positive = 3

    @model_validator(mode="after")
    def _is_in_order(self) -> "ThreeTierEscalation":
        if not self.tier1 < self.tier2 < self.tier3:
            raise ValueError(f"tiers must increase, got {self.tier1}, {self.tier2} and {self.tier3}")
        return self

    @property
    def starts(self) -> tuple[int, int, int]:
        """The steps that the tiers begin at."""
        return self.tier1, self.tier2, self.tier3


@checked(config=_STRICT)
class ProgressTracker:
    """What test runs and actions say about progress, within a slate.

    Progress is a run of the tests in which, against the best one of the slate, a strict superset of tests passes; or
    more of them pass and fewer fail; or all is well for the first time, and none of those that passed is gone. Fewer
    failing ones alone are none: a broken import hides many tests after one error. Going to and fro between two states
    is progress once at most.

    A check without progress is a *stuck* one if its signature was seen at any check since the last progress, not just
    at the one before it: going to and fro between two failing states is stuck. A signature that is new is neither
    progress nor stuck: it leaves the count as it is.

    Attributes:
        history: Signatures of the checks.
        seen: Those since the last progress, with its own.
        stuck: Stuck checks since the last progress.
        passed: Tests that passed in the best run.
        failing: How many failed in it.
        ok: Whether all was well in it.
        progressed: Whether there was progress since the last check.
        approaches: Names of the strategies tried, in order, those of earlier slates too.
        actions: Digests of the actions.
        pairs: How often an action led to the same observation, by the digest of both.
        errors: How often each refusal was given.
    """

    history: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    stuck: Count = 0
    passed: frozenset[str] = frozenset()
    failing: Count = 0
    ok: bool = False
    progressed: bool = False
    approaches: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    pairs: dict[str, Count] = field(default_factory=dict)
    errors: dict[str, Count] = field(default_factory=dict)

    @classmethod
    def of_slate(cls, report: TestReport, approaches: Sequence[str] = ()) -> "ProgressTracker":
        """A tracker that knows nothing but how a slate begins.

        Args:
            report: Of the tests as they are then.
            approaches: Tried so far.
        """
        tracker = cls(approaches=list(approaches))
        tracker._take(report)
        tracker.progressed = False
        return tracker

    def observe(self, report: TestReport) -> bool:
        """Takes in a run of the tests.

        Args:
            report: Of it.

        Returns:
            Whether it is progress.
        """
        more = len(report.passed) > len(self.passed)
        better = self.passed < report.passed or (more and len(report.failing) < self.failing)
        if better or (report.ok and not self.ok and self.passed <= report.passed):
            self._take(report)
            return True
        return False

    def check(self, report: TestReport) -> bool:
        """Takes in what the tests say at a check.

        Args:
            report: Of the files as they are.

        Returns:
            Whether there was progress since the last check.
        """
        progressed = self.observe(report) or self.progressed
        self.progressed = False
        self.history.append(report.signature)
        if report.signature not in self.seen:
            self.seen.append(report.signature)
        elif not progressed:
            self.stuck += 1
        return progressed

    def act(self, action: str, observation: str, refused: bool) -> int:
        """Takes in an action.

        Args:
            action: As text.
            observation: That it led to.
            refused: Whether it was refused.

        Returns:
            How often this action has led to this observation, this time included.
        """
        digest = _digest(action)
        pair = _digest(f"{digest} {observation}")
        self.actions.append(digest)
        self.pairs[pair] = self.pairs.get(pair, 0) + 1
        if refused:
            self.errors[observation] = self.errors.get(observation, 0) + 1
        return self.pairs[pair]

    @property
    def repeats(self) -> int:
        """Actions that led where the same action had led before."""
        return sum(self.pairs.values()) - len(self.pairs)

    @property
    def repeated_errors(self) -> list[str]:
        """Refusals that were given more than once."""
        return [error for error, count in self.errors.items() if count > 1]

    @property
    def is_ping_pong(self) -> bool:
        """Whether the last four actions are two in turn."""
        last = self.actions[-4:]
        return len(last) == 4 and last[:2] == last[2:] and last[0] != last[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "passed": sorted(self.passed)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ProgressTracker":
        """The tracker out of the values of `to_dict`.

        Raises:
            ValueError: For an unknown key or a bad value.
        """
        return cls(**value)

    def _take(self, report: TestReport) -> None:
        self.passed, self.failing, self.ok = report.passed, len(report.failing), report.ok
        self.seen = [report.signature]
        self.stuck = 0
        self.progressed = True


@checked(config=_STRICT)
class Escalator:
    """Where a run stands in its escalation.

    Attributes:
        config: When tiers act.
        tier: 0 to 2; tier 3 ends the slate at once.
        slate: Clean slates before this one.
        slate_start: Steps taken before it.
        highest: The highest tier that acted.
    """

    config: ThreeTierEscalation
    tier: Annotated[int, Field(ge=0, le=2, strict=True)] = 0
    slate: Count = 0
    slate_start: Count = 0
    highest: Annotated[int, Field(ge=0, le=3, strict=True)] = 0

    def is_check(self, step: int) -> bool:
        """Whether the tests are looked at after a step, counted from 1."""
        return step % self.config.check_interval == 0

    def check(self, step: int, stuck: int) -> Measure | None:
        """Goes up a tier if it is time to.

        Args:
            step: The one just taken, from 1.
            stuck: `ProgressTracker.stuck`.

        Returns:
            What the loop has to do; None for nothing.
        """
        late = step - self.slate_start >= self.config.starts[self.tier]
        if not late or stuck < self.config.patience or step >= self.config.max_steps:
            return None
        measure = MEASURES[self.tier]
        self.tier += 1
        self.highest = max(self.highest, self.tier)
        if measure == "reset":
            self.tier, self.slate, self.slate_start = 0, self.slate + 1, step
        return measure

    def progress(self) -> bool:
        """Goes down a tier.

        Returns:
            Whether there was one to go down to.
        """
        if self.tier == 0:
            return False
        self.tier -= 1
        return True

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Escalator":
        """The escalator out of the values of `to_dict`.

        Raises:
            ValueError: For an unknown key or a bad value.
        """
        return cls(**value)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
