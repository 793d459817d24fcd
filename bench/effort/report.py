"""Sums over runs: how often a policy accepts, how often rightly, and at what cost, with 95 % intervals; as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sigma0.bench.core.conditions import mean_of
from sigma0.bench.core.output import BenchTable, with_interval
from sigma0.bench.effort.measure import Ended
from sigma0.calibrate.bootstrap import Estimate, share
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


@dataclass(frozen=True)
class PolicySummary:
    """One policy over many runs."""

    policy: str  # Its name
    runs: int  # How many
    accepted_right: Estimate  # Share of runs that accepted a right solution
    accepted_wrong: Estimate  # Share of runs that accepted a wrong one: false accepts
    wrong_of_accepted: Estimate | None  # Share of the accepted that were wrong; None where none was accepted
    right: Estimate  # Share of runs that ended with a right solution, accepted or not
    verifications: Estimate  # Mean, which is also the mean number of iterations
    cost: Estimate  # Mean, in the unit of the run


@dataclass(frozen=True)
class EffortReport:
    """What the command writes."""

    kind: Literal["simulation", "measurement"]  # Whether models or dice were at work
    settings: dict[str, Any]  # All that the figures hold for
    unit: str  # Of `cost`
    policies: tuple[PolicySummary, ...]  # One summary each
    # Share of first solutions that were right; of a simulation its own odds are in the settings
    first_right: Estimate | None = None


def summarise(policy: str, runs: Sequence[Ended]) -> PolicySummary:
    """Sums up the runs of one policy, at least one."""
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
        verifications=mean_of([run.verifications for run in runs]),
        cost=mean_of([run.cost for run in runs]),
    )


HEADINGS = ("policy", "right, accepted", "wrong, accepted", "wrong of accepted", "right in the end", "verifications")


def table(report: EffortReport) -> BenchTable:
    """A row for each policy, for a terminal or a page of results."""
    cells = [
        (
            item.policy,
            *map(with_interval, (item.accepted_right, item.accepted_wrong, item.wrong_of_accepted, item.right)),
            with_interval(item.verifications, times=1, unit=""),
            with_interval(item.cost, times=1, unit=""),
        )
        for item in report.policies
    ]
    return BenchTable((*HEADINGS, report.unit), cells, title(report))


def title(report: EffortReport) -> str:
    """What the figures are."""
    if report.kind == "simulation":
        return "SIMULATED with stated odds, not measured"
    return f"measured: {report.settings['solver']} verified by {report.settings['verifier']}"
