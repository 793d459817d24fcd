"""Doors against their definitions, threshold by threshold in plain Python."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from sklearn.isotonic import isotonic_regression

from sigma0.calibrate.doors import (
    Judged,
    check_policy,
    fit_vetoes,
    judge,
    most_wrong,
    passing_policies,
    predicted_power,
    rank,
    risk_p_value,
)
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, door
from tests.signals.test_verdict import make as verdict


def judged(confidence, right, vetoed=None):
    vetoed = np.zeros(len(confidence), dtype=bool) if vetoed is None else np.array(vetoed, dtype=bool)
    return Judged(np.array(confidence, dtype=float), vetoed, np.array(right, dtype=bool))


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


def test_powers_and_levels_of_thresholds_are_their_definition():
    rng = np.random.default_rng(0)
    sure = np.round(rng.random(60), 2)
    sure[:6] = [-1.0, -1.0, 0.0, 1.0, 0.5, 0.5]
    answers = judged(sure, rng.random(60) < 0.6 + 0.4 * sure, rng.random(60) < 0.1)
    thresholds = np.array([1.0, 0.9, 0.5, 0.25, 0.0])
    expected = [power_by_hand(answers, threshold, 0.3, 0.1, 90) for threshold in thresholds]
    assert predicted_power(answers, thresholds, 0.3, 0.1, 90) == pytest.approx(expected, rel=1e-9)
    assert 0 < expected[-1] < max(expected)
    # one answer of one, right by luck with a chance of a half
    policies = [DoorPolicy(min_confidence=0.5)]
    assert passing_policies(judged([0.5], [True]), policies, 0.5, 0.5) == (policies, 1)
    assert passing_policies(judged([0.5], [True]), policies, 0.5, 0.51) == ([], 1)
    assert passing_policies(judged([0.5], [True]), [], 0.5, 0.5) == ([], 0)
    shut = [*policies, DoorPolicy(min_confidence=0.6)]
    assert passing_policies(judged([0.5], [True]), shut, 0.5, 0.5) == (policies, 2)


def thresholds_of(answers, **more):
    return [policy.min_confidence for policy in rank(answers, DoorPolicy(tau_c=0.7), 0.2, 0.9, 300, **more)]


def test_thresholds_are_the_confidences_from_the_likeliest_on_two_hundred_at_most():
    rng = np.random.default_rng(1)
    sure = np.concatenate([[-1.0, 0.0], rng.permutation(np.arange(1, 60)) / 60])
    answers = judged(sure, rng.random(61) < 0.5 + 0.5 * sure)
    known = sure[sure >= 0]
    every = list(dict.fromkeys(np.quantile(known, np.linspace(1, 0, 60), method="lower").tolist()))
    power = predicted_power(answers, np.array(every), 0.2, 1 - 0.9, 300)
    result = thresholds_of(answers)
    assert result == every[int(np.argmax(power)) :] and result[-1] == 0.0 and len(result) < len(every)
    sure = np.linspace(0, 1, 1001)
    # the less sure are right, so that the loosest passes best
    result = thresholds_of(judged(sure, sure < 0.995))
    levels = np.quantile(sure, np.linspace(1, 0, 200), method="lower").tolist()
    assert result == levels[-len(result) :] and len(result) > 1


def test_figures_of_a_policy_and_where_there_is_nothing_to_tell():
    answers = judged([0.9, 0.8, 0.7, 0.2, -1.0], [True, False, True, False, False], [False, False, True, False, False])
    check = check_policy(answers, DoorPolicy(min_confidence=0.75))
    assert (check.prompts, check.right.value, check.opened.value) == (5, 0.4, 0.4)
    assert (check.right_of_opened.value, check.opened_of_right.value) == (0.5, 0.5)
    assert check.auroc == pytest.approx(5 / 6)
    assert check.brier == pytest.approx((0.1**2 + 0.8**2 + 0.3**2 + 0.2**2 + 0.0) / 5)
    with pytest.raises(ValueError, match="no answers"):
        check_policy(judged([], []), DoorPolicy())
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
    for loose, moved in ((0.7, 0.8), (0.76, 0.76)):
        near = [verdict(proximity=0.75)] * 20
        assert fit_vetoes(near, np.ones(20, dtype=bool), DoorPolicy(tau_c=loose)).tau_c == moved, "never tightened"
    # of wrong answers nothing is asked, and of two hundred right ones one may be shut out
    assert fit_vetoes(verdicts, np.arange(51) < 50, DoorPolicy()) == DoorPolicy()
    for others, moved in ((199, 0.5), (198, tau_c)):
        many = [verdict()] * others + verdicts[-1:]
        assert fit_vetoes(many, np.ones(others + 1, dtype=bool), DoorPolicy()).tau_c == moved


@pytest.mark.parametrize(
    "base, grounded, tau_g",
    [(0.5, 0.51, 0.5), (0.5, 0.5, 0.25), (0.5, 0.25, 0.0), (0.5, 0.0, None), (0.75, 0.6, 0.5), (None, 0.0, None),
     (0.1, 0.05, 0.0)],
)  # fmt: skip
def test_a_veto_of_grounding_moves_likewise_and_never_up(base, grounded, tau_g):
    verdicts = [verdict(grounded=1.0)] * 20 + [verdict(grounded=grounded)]
    assert fit_vetoes(verdicts, np.ones(21, dtype=bool), DoorPolicy(tau_g=base)).tau_g == tau_g


@pytest.mark.parametrize("opened, wrong, allowed", [(1, 0, 0.5), (40, 3, 0.1), (200, 12, 0.05), (7, 7, 0.2)])
def test_the_p_value_is_the_binomial_sum(opened, wrong, allowed):
    expected = sum(comb(opened, k) * allowed**k * (1 - allowed) ** (opened - k) for k in range(wrong + 1))
    assert risk_p_value(opened, wrong, allowed) == pytest.approx(expected, rel=1e-9)
    assert risk_p_value(0, 0, allowed) == 1.0, "nothing let through proves nothing"


@given(st.integers(0, 60), st.floats(0.01, 0.6), st.floats(0.01, 0.4))
def test_the_most_wrong_answers_are_the_most_that_pass(opened, allowed, level):
    passing = [wrong for wrong in range(opened + 1) if risk_p_value(opened, wrong, allowed) <= level]
    assert most_wrong(np.array([opened]), allowed, level).tolist() == [max(passing, default=-1)]


def test_tests_end_at_the_first_policy_that_fails_and_without_a_confidence_there_is_one():
    # the order was fixed beforehand: a later policy has no say, however good it looks
    answers = judged([0.9] * 100 + [0.1] * 100, [True] * 100 + [False] * 100)
    good, bad = DoorPolicy(min_confidence=0.5), DoorPolicy(min_confidence=0.0)
    assert passing_policies(answers, [good, bad, good], 0.05, 0.95) == ([good], 2)
    assert passing_policies(answers, [bad, good], 0.05, 0.95) == ([], 1)
    assert passing_policies(answers, [good, good], 0.05, 0.95) == ([good, good], 2)
    answers = judged([-1.0] * 5, [True] * 5)
    assert rank(answers, DoorPolicy(), 0.1, 0.9, 50) == [DoorPolicy(min_confidence=1.0)]


VERDICTS = st.builds(
    ReasonVerdict, converged=st.sampled_from([True, True, None]), depth=st.just(2.0), proximity=st.floats(0, 1),
    grounded=st.none() | st.floats(0, 1), stable=st.sampled_from(["contract", "contract", "spiral"]),
    reason=st.sampled_from(["confident", "collapse", "out_of_calibration", "max_depth", None]),
    confidence=st.none() | st.floats(0, 1),
)  # fmt: skip


@given(
    st.lists(VERDICTS, min_size=1, max_size=20), st.floats(0, 1), st.none() | st.floats(0, 1), st.floats(0, 1),
    st.sampled_from(["confidence", "certificate"]),
)  # fmt: skip
def test_a_judged_answer_is_let_through_where_the_door_opens(verdicts, least, tau_g, tau_c, rule):
    policy = DoorPolicy(min_confidence=least, tau_g=tau_g, tau_c=tau_c, rule=rule)
    right = [place % 2 == 0 for place in range(len(verdicts))]
    answers = judge(verdicts, right, policy)
    opened = [door(verdict, policy) == "converge" for verdict in verdicts]
    assert answers.opens(policy).tolist() == opened
    wrong = sum(opens and not fits for opens, fits in zip(opened, right, strict=True))
    assert answers.opened_and_wrong(policy) == (sum(opened), wrong)
