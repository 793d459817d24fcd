"""Sums over runs: how often a policy accepts, how often rightly, and at what cost, with 95 % intervals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from sigma0.calibrate.bootstrap import Estimate, ratio, share
from sigma0.reason.progressive.policies import (
    DUAL_TRACK,
    HYBRID_DEFAULT,
    ITERATION_SCHEDULE,
    MULTI_STAGE,
    SUCCESS_BASED,
    ProgressiveConfig,
    Stage,
)

FLAT_HIGH = ProgressiveConfig("flat high", (Stage("high", 5),))
POLICIES = (ITERATION_SCHEDULE, SUCCESS_BASED, DUAL_TRACK, MULTI_STAGE, HYBRID_DEFAULT, FLAT_HIGH)


class Ended(Protocol):
    """What is counted of a run."""

    @property
    def accepted(self) -> bool:
        """Whether the policy accepted a solution."""

    @property
    def right(self) -> bool:
        """Whether the solution that stood was right."""

    @property
    def verifications(self) -> int:
        """Calls of the verifier: iterations of the loop."""


@dataclass(frozen=True)
class PolicySummary:
    """One policy over many runs.

    Attributes:
        policy: Its name.
        runs: How many.
        accepted_right: Share of runs that accepted a right solution.
        accepted_wrong: Share of runs that accepted a wrong one: false accepts.
        wrong_of_accepted: Share of the accepted that were wrong; None where none was accepted.
        right: Share of runs that ended with a right solution, accepted or not.
        verifications: Mean, which is also the mean number of iterations.
        cost: Mean, in the unit of the run.
    """

    policy: str
    runs: int
    accepted_right: Estimate
    accepted_wrong: Estimate
    wrong_of_accepted: Estimate | None
    right: Estimate
    verifications: Estimate
    cost: Estimate


@dataclass(frozen=True)
class EffortReport:
    """What the command writes.

    Attributes:
        kind: Whether models or dice were at work.
        settings: All that the figures hold for.
        unit: Of `cost`.
        policies: One summary each.
        first_right: Share of first solutions that were right; of a simulation its own odds are in the settings.
    """

    kind: Literal["simulation", "measurement"]
    settings: dict[str, Any]
    unit: str
    policies: tuple[PolicySummary, ...]
    first_right: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def summarise(policy: str, runs: Sequence[Ended], costs: Sequence[float]) -> PolicySummary:
    """Sums up the runs of one policy.

    Args:
        policy: Its name.
        runs: At least one.
        costs: Of each.
    """
    n = len(runs)
    accepted = [run for run in runs if run.accepted]
    right = sum(run.right for run in accepted)
    return PolicySummary(
        policy=policy,
        runs=n,
        accepted_right=share(right, n),
        accepted_wrong=share(len(accepted) - right, n),
        wrong_of_accepted=share(len(accepted) - right, len(accepted)) if accepted else None,
        right=share(sum(run.right for run in runs), n),
        verifications=_mean([run.verifications for run in runs]),
        cost=_mean(costs),
    )


def _mean(values: Sequence[float]) -> Estimate:
    found = ratio(values, [1.0] * len(values))
    assert found is not None
    return found
