"""Doors for a stated risk: the least confidence at which at most so many of the answers let through are wrong.

Learn then Test with fixed-sequence testing (arXiv 2110.01052): thresholds are tested in an order fixed beforehand, each
at the full level, down to the first that fails. Of k answers let through the wrong ones are Binomial(k, chance), so the
p-value of "an answer that the door lets through is wrong with a chance above the risk" is exact: P(Binomial(k, risk) <=
wrong ones). The order comes from data of its own (arXiv 2210.07913): from the threshold with the least p-value there,
where most can be shown, to ever looser ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binom
from sklearn.metrics import brier_score_loss, roc_auc_score

from sigma0.calibrate.bootstrap import Estimate, share
from sigma0.calibrate.confidence import Bools, calibration_error
from sigma0.signals.evidence import Floats
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, objections

TAUS_C = (0.5, 0.65, 0.8, 0.95, 1.0)
TAUS_G: tuple[float | None, ...] = (0.5, 0.25, 0.0, None)
# Share of the right answers that a veto may shut out: beyond it, it says nothing of right and wrong here.
VETOED = 0.005
_THRESHOLDS = 200


@dataclass(frozen=True)
class Judged:
    """Answers as a door sees them.

    Attributes:
        confidence: Of each, `[n]`; -1 where it is not known.
        vetoed: Whether something else than its confidence shuts the door, `[n]`.
        right: Whether it is right, `[n]`.
    """

    confidence: Floats
    vetoed: Bools
    right: Bools

    def opens(self, policy: DoorPolicy) -> Bools:
        """Which answers the converge door lets through, `[n]`; the vetoes are those that were judged by."""
        opened: Bools = (self.confidence >= policy.min_confidence) & ~self.vetoed
        return opened

    def opened_and_wrong(self, policy: DoorPolicy) -> tuple[int, int]:
        """How many are let through, and how many of them are wrong."""
        opened = self.opens(policy)
        return int(opened.sum()), int((opened & ~self.right).sum())


@dataclass(frozen=True)
class DoorCheck:
    """A policy on prompts that had no part in its choice.

    Attributes:
        prompts: How many.
        right: Share of right answers.
        opened: Share of the answers that the converge door lets through.
        right_of_opened: Share of right ones among them; None if there are none.
        opened_of_right: Share of the right answers that it opens for; None if none is right.
        auroc: Chance that a wrong answer has less confidence than a right one; None where all are right or wrong.
        brier: Mean squared difference of confidence and right or wrong.
        calibration_error: Mean difference of confidence and share of right answers, over tenths of the answers.
    """

    prompts: int
    right: Estimate
    opened: Estimate
    right_of_opened: Estimate | None
    opened_of_right: Estimate | None
    auroc: float | None
    brier: float
    calibration_error: float


def judge(verdicts: Sequence[ReasonVerdict], right: Sequence[bool] | Bools, policy: DoorPolicy) -> Judged:
    """Answers under the vetoes of a policy, whose least confidence is left open."""
    anyone = replace(policy, min_confidence=0.0)
    known = [-1.0 if verdict.confidence is None else verdict.confidence for verdict in verdicts]
    vetoed = [bool(objections(verdict, anyone)) for verdict in verdicts]
    return Judged(np.array(known), np.array(vetoed, dtype=np.bool_), np.array(right, dtype=np.bool_))


def fit_vetoes(verdicts: Sequence[ReasonVerdict], right: Bools, base: DoorPolicy) -> DoorPolicy:
    """The policy, with thresholds of repetition and grounding loosened where they shut out right answers.

    Each stays where it is unless it shuts out more than `VETOED` of the right answers; then it is the tightest on its
    grid that does not.

    Args:
        verdicts: On answers.
        right: Whether each is right.
        base: The policy so far.
    """
    good = [verdict for verdict, fits in zip(verdicts, right, strict=True) if fits]

    def shut(values: list[bool]) -> bool:
        return sum(values) > VETOED * len(values)

    def too_near(tau: float) -> bool:
        return shut([verdict.proximity >= tau for verdict in good])

    def too_loose(tau: float | None) -> bool:
        return tau is not None and shut([verdict.grounded is not None and verdict.grounded <= tau for verdict in good])

    taus_c = [base.tau_c, *(tau for tau in TAUS_C if tau > base.tau_c)]
    floor = base.tau_g
    taus_g = [floor, *(tau for tau in TAUS_G if floor is not None and (tau is None or tau < floor))]
    tau_c = next((tau for tau in taus_c if not too_near(tau)), taus_c[-1])
    tau_g = next(tau for tau in taus_g if not too_loose(tau))
    return replace(base, tau_c=tau_c, tau_g=tau_g)


def risk_p_value(opened: int, wrong: int, risk: float) -> float:
    """Exact p-value of "an answer let through is wrong with a chance above `risk`"; 1 where none is."""
    return float(binom.cdf(wrong, opened, risk)) if opened else 1.0


def rank(answers: Judged, base: DoorPolicy, risk: float) -> list[DoorPolicy]:
    """Policies in the order of their test: from the safest on these answers to ever looser ones.

    Args:
        answers: Of the fit, with cross-fitted confidences.
        base: Everything but the least confidence.
        risk: Allowed.
    """
    known = answers.confidence[answers.confidence >= 0]
    if not len(known):
        return [replace(base, min_confidence=1.0)]
    levels = np.quantile(known, np.linspace(1, 0, min(_THRESHOLDS, len(known))), method="lower")
    thresholds = [float(level) for level in dict.fromkeys(levels.tolist())]
    policies = [replace(base, min_confidence=threshold) for threshold in thresholds]
    p_values = [risk_p_value(*answers.opened_and_wrong(policy), risk) for policy in policies]
    return policies[int(np.argmin(p_values)) :]


def passing_policies(
    answers: Judged, ranked: Sequence[DoorPolicy], risk: float, confidence: float
) -> tuple[list[DoorPolicy], int]:
    """The policies that keep the promise, in the order of the test, and how many were tested."""
    passed: list[DoorPolicy] = []
    for policy in ranked:
        if risk_p_value(*answers.opened_and_wrong(policy), risk) > 1 - confidence:
            return passed, len(passed) + 1
        passed.append(policy)
    return passed, len(passed)


def check_policy(answers: Judged, policy: DoorPolicy) -> DoorCheck:
    """Figures of a policy.

    Raises:
        ValueError: For no answers.
    """
    n, right = len(answers.right), answers.right
    if not n:
        raise ValueError("no answers to check a policy on")
    opened = answers.opens(policy)
    both, known = int((opened & right).sum()), np.clip(answers.confidence, 0, 1)
    return DoorCheck(
        prompts=n,
        right=share(int(right.sum()), n),
        opened=share(int(opened.sum()), n),
        right_of_opened=share(both, int(opened.sum())) if opened.any() else None,
        opened_of_right=share(both, int(right.sum())) if right.any() else None,
        auroc=float(roc_auc_score(right, known)) if 0 < right.sum() < n else None,
        brier=float(brier_score_loss(right, known)),
        calibration_error=calibration_error(known, right),
    )
