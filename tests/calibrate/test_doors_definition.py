"""Doors against their definitions, threshold by threshold in plain Python."""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.isotonic import isotonic_regression

from sigma0.calibrate.doors import (
    Judged,
    check_policy,
    fit_vetoes,
    judge,
    passing_policies,
    predicted_power,
    rank,
    risk_p_value,
)
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict


def judged(confidence, right, vetoed=None):
    vetoed = np.zeros(len(confidence), dtype=bool) if vetoed is None else np.array(vetoed, dtype=bool)
    return Judged(np.array(confidence, dtype=float), vetoed, np.array(right, dtype=bool))


def verdict(proximity=0.0, grounded=None, confidence=0.95):
    return ReasonVerdict(
        converged=True, depth=2.0, proximity=proximity, grounded=grounded, stable=None, reason="confident",
        confidence=confidence,
    )  # fmt: skip


def power_by_hand(answers, threshold, risk, level, tested):
    """Of one threshold, bootstrap by bootstrap."""
    known = [place for place, sure in enumerate(answers.confidence) if sure >= 0 and not answers.vetoed[place]]
    known.sort(key=lambda place: -answers.confidence[place])
    wrong = np.array([not answers.right[place] for place in known], dtype=float)
    opened = sum(answers.confidence[place] >= threshold for place in known)
    trials = round(opened * tested / len(answers.right))
    allowed = max((k for k in range(trials + 1) if risk_p_value(trials, k, risk) <= level), default=-1)
    chances = []
    for weights in np.random.default_rng(0).exponential(size=(20, len(wrong))):
        smooth = isotonic_regression(wrong, sample_weight=weights)
        some, whole = (weights * smooth)[:opened].sum(), weights[:opened].sum()
        chances.append((some + 0.5) / (whole + 1))
    return np.mean([binom.cdf(allowed, trials, chance) for chance in chances])


def test_the_power_of_each_threshold_is_its_definition():
    rng = np.random.default_rng(0)
    sure = np.round(rng.random(60), 2)
    sure[:6] = [-1.0, -1.0, 0.0, 1.0, 0.5, 0.5]
    answers = judged(sure, rng.random(60) < 0.6 + 0.4 * sure, rng.random(60) < 0.1)
    thresholds = np.array([1.0, 0.9, 0.5, 0.25, 0.0])
    expected = [power_by_hand(answers, threshold, 0.3, 0.1, 90) for threshold in thresholds]
    assert predicted_power(answers, thresholds, 0.3, 0.1, 90) == pytest.approx(expected, rel=1e-9)
    assert 0 < expected[-1] < max(expected)


def thresholds_of(answers, **more):
    return [policy.min_confidence for policy in rank(answers, DoorPolicy(tau_c=0.7), 0.2, 0.9, 300, **more)]


def test_thresholds_are_the_confidences_from_the_likeliest_on():
    rng = np.random.default_rng(1)
    sure = np.concatenate([[-1.0, 0.0], rng.permutation(np.arange(1, 60)) / 60])
    answers = judged(sure, rng.random(61) < 0.5 + 0.5 * sure)
    known = sure[sure >= 0]
    every = list(dict.fromkeys(np.quantile(known, np.linspace(1, 0, 60), method="lower").tolist()))
    power = predicted_power(answers, np.array(every), 0.2, 1 - 0.9, 300)
    found = thresholds_of(answers)
    assert found == every[int(np.argmax(power)) :] and found[-1] == 0.0 and len(found) < len(every)


def test_of_many_confidences_two_hundred_are_tested():
    sure = np.linspace(0, 1, 1001)
    # the less sure are right, so that the loosest passes best
    found = thresholds_of(judged(sure, sure < 0.995))
    levels = np.quantile(sure, np.linspace(1, 0, 200), method="lower").tolist()
    assert found == levels[-len(found) :] and len(found) > 1


def test_a_test_passes_at_its_very_level():
    """One answer of one, right by luck with a chance of a half."""
    policies = [DoorPolicy(min_confidence=0.5)]
    assert passing_policies(judged([0.5], [True]), policies, 0.5, 0.5) == (policies, 1)
    assert passing_policies(judged([0.5], [True]), policies, 0.5, 0.51) == ([], 1)
    assert passing_policies(judged([0.5], [True]), [], 0.5, 0.5) == ([], 0)
    shut = [*policies, DoorPolicy(min_confidence=0.6)]
    assert passing_policies(judged([0.5], [True]), shut, 0.5, 0.5) == (policies, 2)


def test_a_door_opens_at_its_least_confidence():
    answers = judged([0.5, 0.49, 0.9, -1.0, 0.6], [True, True, False, True, False], [0, 0, 1, 0, 0])
    policy = DoorPolicy(min_confidence=0.5)
    assert answers.opens(policy).tolist() == [True, False, False, False, True]
    assert answers.opened_and_wrong(policy) == (2, 1)


def test_answers_are_judged_by_all_but_their_confidence():
    verdicts = [verdict(confidence=0.0), verdict(proximity=0.6), verdict(confidence=None), verdict(grounded=0.1)]
    answers = judge(verdicts, [True, False, True, True], DoorPolicy(min_confidence=0.9))
    assert answers.confidence.tolist() == [0.0, 0.95, -1.0, 0.95] and answers.right.tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert answers.vetoed.tolist() == [False, True, True, True]


def test_figures_where_there_is_nothing_to_tell():
    check = check_policy(judged([0.5, 0.75], [True, True]), DoorPolicy(min_confidence=0.9))
    assert (check.right.value, check.opened.value, check.right_of_opened, check.auroc) == (1.0, 0.0, None, None)
    assert check.opened_of_right.value == 0.0
    wrong = check_policy(judged([0.5, 0.75], [False, False]), DoorPolicy(min_confidence=0.6))
    assert (wrong.right.value, wrong.opened_of_right, wrong.auroc) == (0.0, None, None)
    assert wrong.right_of_opened.value == 0.0 and wrong.opened.value == 0.5
    one = check_policy(judged([0.25, 0.75], [False, True]), DoorPolicy(min_confidence=0.0))
    assert (one.auroc, one.brier, one.calibration_error) == (1.0, 0.0625, pytest.approx(0.25))


@pytest.mark.parametrize(
    "proximity, tau_c", [(0.49, 0.5), (0.5, 0.65), (0.65, 0.8), (0.8, 0.95), (0.95, 1.0), (1.0, 1.0)]
)
def test_a_veto_of_repetition_moves_to_the_tightest_that_lets_right_answers_through(proximity, tau_c):
    verdicts = [verdict()] * 50 + [verdict(proximity=proximity)]
    assert fit_vetoes(verdicts, np.ones(51, dtype=bool), DoorPolicy()).tau_c == tau_c
    # of wrong answers nothing is asked
    assert fit_vetoes(verdicts, np.arange(51) < 50, DoorPolicy()) == DoorPolicy()


@pytest.mark.parametrize("others, tau_c", [(199, 0.5), (198, 0.8)])
def test_one_right_answer_of_two_hundred_may_be_shut_out(others, tau_c):
    verdicts = [verdict()] * others + [verdict(proximity=0.7)]
    assert fit_vetoes(verdicts, np.ones(others + 1, dtype=bool), DoorPolicy()).tau_c == tau_c


@pytest.mark.parametrize(
    "base, grounded, tau_g",
    [(0.5, 0.51, 0.5), (0.5, 0.5, 0.25), (0.5, 0.25, 0.0), (0.5, 0.0, None), (0.75, 0.6, 0.5), (None, 0.0, None),
     (0.1, 0.05, 0.0)],
)  # fmt: skip
def test_a_veto_of_grounding_moves_likewise_and_never_up(base, grounded, tau_g):
    verdicts = [verdict(grounded=1.0)] * 20 + [verdict(grounded=grounded)]
    assert fit_vetoes(verdicts, np.ones(21, dtype=bool), DoorPolicy(tau_g=base)).tau_g == tau_g


def test_a_veto_of_repetition_is_never_tightened():
    verdicts = [verdict(proximity=0.75)] * 20
    assert fit_vetoes(verdicts, np.ones(20, dtype=bool), DoorPolicy(tau_c=0.7)).tau_c == 0.8
    assert fit_vetoes(verdicts, np.ones(20, dtype=bool), DoorPolicy(tau_c=0.76)).tau_c == 0.76
