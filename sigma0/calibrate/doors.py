"""Doors for a stated risk: the least confidence at which at most so many of the answers let through are wrong.

A certificate reads no confidence: one level sets its thresholds of repetition (1 - level) and grounding (level).

Of k answers let through the wrong ones are Binomial(k, chance), so the p-value of "an answer that the door lets through
is wrong with a chance above the risk" is exact: P(Binomial(k, risk) <= wrong ones). `rank` puts the thresholds into an
order on answers of its own (arXiv 2210.07913), `passing_policies` tests them on others, each at a level, so that with
the stated confidence none that passes has a risk above the stated one (Learn then Test, arXiv 2110.01052, section 3.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from sklearn.isotonic import isotonic_regression
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
# By which a certificate's thresholds, which are strict, let the answers at its level through.
_SLACK = 1e-9
_RESAMPLES = 20
_SEED = 0


@dataclass(frozen=True)
class Judged:
    """Answers as a door sees them."""

    confidence: Floats  # Of each, `[n]`; -1 where it is not known
    vetoed: Bools  # Whether something else than the thresholds that are tested shuts the door, `[n]`
    right: Bools  # Whether it is right, `[n]`
    proximity: Floats | None = None  # Of each, `[n]`; of a certificate alone
    grounded: Floats | None = None  # Of each, `[n]`; NaN where it is not known; of a certificate alone

    def opens(self, policy: DoorPolicy) -> Bools:
        """Which answers the converge door lets through, `[n]`; the vetoes are those that were judged by."""
        if policy.rule == "confidence":
            opened: Bools = self.confidence >= policy.min_confidence
        else:
            assert self.proximity is not None and self.grounded is not None, "judged under a certificate"
            # NaN is under nothing
            loose = self.grounded <= (-1.0 if policy.tau_g is None else policy.tau_g)
            opened = (self.proximity < policy.tau_c) & ~loose
        return opened & ~self.vetoed

    def by_level(self, policy: DoorPolicy) -> "Judged":
        """The same with the level that a certificate opens up to in place of the confidence."""
        assert self.proximity is not None and self.grounded is not None, "judged under a certificate"
        asked = np.ones_like(self.grounded) if policy.tau_g is None else np.nan_to_num(self.grounded, nan=1.0)
        return replace(self, confidence=np.minimum(1 - self.proximity, asked))

    def opened_and_wrong(self, policy: DoorPolicy) -> tuple[int, int]:
        """How many are let through, and how many of them are wrong."""
        opened = self.opens(policy)
        return int(opened.sum()), int((opened & ~self.right).sum())


@dataclass(frozen=True)
class DoorCheck:
    """A policy on prompts that had no part in its choice."""

    prompts: int  # How many
    right: Estimate  # Share of right answers
    opened: Estimate  # Share of the answers that the converge door lets through
    right_of_opened: Estimate | None  # Share of right ones among them; None if there are none
    opened_of_right: Estimate | None  # Share of the right answers that it opens for; None if none is right
    # Chance that a wrong answer has less confidence than a right one; None where all are right or wrong
    auroc: float | None
    brier: float  # Mean squared difference of confidence and right or wrong
    calibration_error: float  # Mean difference of confidence and share of right answers, over tenths of the answers


def judge(verdicts: Sequence[ReasonVerdict], right: Sequence[bool] | Bools, policy: DoorPolicy) -> Judged:
    """Answers under the vetoes of a policy, whose least confidence is left open, or of a certificate its level."""
    certified = policy.rule == "certificate"
    anyone = loosest(policy) if certified else replace(policy, min_confidence=0.0)
    known = [-1.0 if verdict.confidence is None else verdict.confidence for verdict in verdicts]
    vetoed = [bool(objections(verdict, anyone)) for verdict in verdicts]
    judged = Judged(np.array(known), np.array(vetoed, dtype=np.bool_), np.array(right, dtype=np.bool_))
    if not certified:
        return judged
    grounded = [math.nan if verdict.grounded is None else verdict.grounded for verdict in verdicts]
    proximity = np.array([verdict.proximity for verdict in verdicts])
    return replace(judged, proximity=proximity, grounded=np.array(grounded))


def loosest(policy: DoorPolicy) -> DoorPolicy:
    """A certificate that asks nothing of repetition and grounding: what its verdicts are made under to be tested."""
    return replace(policy, tau_c=1.0, tau_g=None)


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


def most_wrong(opened: NDArray[np.int64], risk: float, level: float) -> NDArray[np.int64]:
    """The most wrong answers among so many let through at which the p-value is at most `level`; -1 where none is."""
    most = binom.ppf(level, opened, risk).astype(np.int64)
    return np.where((opened > 0) & (binom.cdf(most, opened, risk) <= level), most, np.where(opened > 0, most - 1, -1))


def predicted_power(answers: Judged, thresholds: Floats, risk: float, level: float, tested: int) -> Floats:
    """Chance that the door at each threshold passes its test, as the answers of the fit have it, `[k]`.

    The least p-value of the fit is a lucky one where many thresholds are looked at. So the chance of a wrong answer is
    smoothed, falling with the confidence (isotonic regression), and the power that follows, P(Binomial(opened, chance)
    <= most wrong ones allowed), is averaged over Bayesian bootstraps (Rubin 1981), for what the fit cannot know.

    Args:
        answers: Of the fit.
        thresholds: Least confidences, `[k]`.
        risk: Allowed.
        level: Of the test.
        tested: Answers of the test.
    """
    known = ~answers.vetoed & (answers.confidence >= 0)
    order = np.argsort(-answers.confidence[known], kind="stable")
    falling, wrong = answers.confidence[known][order], (~answers.right[known][order]).astype(np.float64)
    opened = np.searchsorted(-falling, -thresholds, side="right")  # [k]
    trials = np.rint(opened * tested / len(answers.right)).astype(np.int64)
    allowed = most_wrong(trials, risk, level)
    chances = np.empty((_RESAMPLES, len(thresholds)))
    for place, weights in enumerate(np.random.default_rng(_SEED).exponential(size=(_RESAMPLES, len(wrong)))):
        expected = weights * isotonic_regression(wrong, sample_weight=weights)
        some, whole = (np.concatenate([[0.0], np.cumsum(item)])[opened] for item in (expected, weights))
        # half a wrong answer more, or a threshold above which none was wrong would seem to have no risk
        chances[place] = (some + 0.5) / (whole + 1)
    power: Floats = binom.cdf(allowed, trials, chances).mean(0)
    return power


def rank(answers: Judged, base: DoorPolicy, risk: float, confidence: float, tested: int) -> list[DoorPolicy]:
    """Policies in the order of their test: from the one most likely to pass it to ever looser ones.

    Args:
        answers: Of the fit, with cross-fitted confidences.
        base: Everything but the least confidence, or a certificate's level.
        risk: Allowed.
        confidence: With which it is to be kept.
        tested: Answers of the test.
    """
    if base.rule == "certificate":
        answers = answers.by_level(base)
    known = answers.confidence[answers.confidence >= 0]
    if not ((answers.confidence >= 0) & ~answers.vetoed).any():
        return [_at(base, 1.0)]
    levels = np.quantile(known, np.linspace(1, 0, min(_THRESHOLDS, len(known))), method="lower")
    thresholds = np.array(list(dict.fromkeys(levels.tolist())))
    first = int(np.argmax(predicted_power(answers, thresholds, risk, 1 - confidence, tested)))
    ranked = [_at(base, threshold) for threshold in thresholds[first:].tolist()]
    # no answer stands between the loosest level and the thresholds that there were: they are not tightened for nothing
    last = ranked[-1]
    if base.rule == "certificate" and last.tau_c < base.tau_c and (base.tau_g or 0.0) <= (last.tau_g or 0.0):
        ranked.append(base)
    return ranked


def _at(base: DoorPolicy, threshold: float) -> DoorPolicy:
    """The policy at a least confidence, or a certificate at a level."""
    if base.rule == "confidence":
        return replace(base, min_confidence=threshold)
    tau_g = None if base.tau_g is None else max(0.0, threshold - _SLACK)
    return replace(base, tau_c=min(1.0, 1 - threshold + _SLACK), tau_g=tau_g)


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
