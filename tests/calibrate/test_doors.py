"""Doors: the promise in repeated draws, and its parts."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

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


def judged(confidence, right, vetoed=None):
    confidence = np.asarray(confidence, dtype=float)
    vetoed = np.zeros(len(confidence), dtype=bool) if vetoed is None else np.asarray(vetoed)
    return Judged(confidence, vetoed, np.asarray(right, dtype=bool))


def drawn(rng, n, power=1.0):
    """Answers whose chance of being right is a power of their confidence."""
    confidence = rng.random(n)
    return judged(confidence, rng.random(n) < confidence**power)


@pytest.mark.parametrize("opened, wrong, allowed", [(1, 0, 0.5), (40, 3, 0.1), (200, 12, 0.05), (7, 7, 0.2)])
def test_the_p_value_is_the_binomial_sum(opened, wrong, allowed):
    expected = sum(comb(opened, k) * allowed**k * (1 - allowed) ** (opened - k) for k in range(wrong + 1))
    assert risk_p_value(opened, wrong, allowed) == pytest.approx(expected, rel=1e-9)


def test_nothing_let_through_proves_nothing():
    assert risk_p_value(0, 0, 0.3) == 1.0


@pytest.mark.exhaustive
def test_the_promise_holds_in_repeated_draws():
    """The true risk above a threshold t, of answers that are right with chance c^0.3, is known; all draws are fresh."""
    rng, allowed, confidence, runs = np.random.default_rng(0), 0.12, 0.9, 400
    broken, opened = 0, 0
    for _ in range(runs):
        ranked = rank(drawn(rng, 400, 0.3), DoorPolicy(), allowed, confidence, 400)
        passed, _ = passing_policies(drawn(rng, 400, 0.3), ranked, allowed, confidence)
        if passed:
            least = passed[-1].min_confidence
            opened += 1
            broken += 1 - (1 - least**1.3) / (1.3 * (1 - least)) > allowed
    # 10 % of the runs may break it; 400 runs spread by 1.5 points
    assert 0 < broken / runs <= 0.1 + 2 * 0.015
    assert opened / runs > 0.8


@given(st.integers(0, 60), st.floats(0.01, 0.6), st.floats(0.01, 0.4))
def test_the_most_wrong_answers_are_the_most_that_pass(opened, allowed, level):
    passing = [wrong for wrong in range(opened + 1) if risk_p_value(opened, wrong, allowed) <= level]
    assert most_wrong(np.array([opened]), allowed, level).tolist() == [max(passing, default=-1)]


def test_power_is_predicted_from_the_chance_of_a_wrong_answer():
    """Where the fit knows the chance well, the prediction is the power of the exact test."""
    answers, thresholds = (
        judged([0.9] * 2000 + [0.5] * 2000, [True, True, True, True, False] * 400 + [True, False] * 1000),
        np.array([0.7]),
    )
    most = max(wrong for wrong in range(51) if risk_p_value(50, wrong, 0.35) <= 0.1)
    found = predicted_power(answers, thresholds, 0.35, 0.1, 100)
    assert found == pytest.approx(binom.cdf(most, 50, 0.2), abs=0.02)
    # every second answer is shut out by a veto
    half = judged(answers.confidence, answers.right, np.arange(4000) % 2 == 0)
    assert predicted_power(half, thresholds, 0.35, 0.1, 200) == pytest.approx(found, abs=0.05)
    assert predicted_power(half, np.array([0.95]), 0.35, 0.1, 200).tolist() == [0.0]


@pytest.mark.slow
def test_the_order_begins_where_the_test_will_most_likely_pass():
    """Not where the fit happens to have the least p-value: the least of many is a lucky one."""
    rng, allowed = np.random.default_rng(0), 0.1

    def power(policy):
        """Of a threshold t with a true risk of 0.01 + 0.2 (1 - t)."""
        let_through = 1 - policy.min_confidence
        opened = np.arange(1, 901)
        passes = binom.cdf(most_wrong(opened, allowed, 0.05), opened, 0.01 + 0.2 * let_through)
        return (binom.pmf(opened, 900, let_through) * passes).sum()

    best = max(power(DoorPolicy(min_confidence=place / 100)) for place in range(1, 100))
    found, least = [], []
    for _ in range(60):
        confidence = rng.random(300)
        answers = judged(confidence, rng.random(300) > 0.01 + 0.4 * (1 - confidence))
        found.append(power(rank(answers, DoorPolicy(), allowed, 0.95, 900)[0]))
        policies = [DoorPolicy(min_confidence=float(each)) for each in np.sort(confidence)]
        p_values = [risk_p_value(*answers.opened_and_wrong(policy), allowed) for policy in policies]
        least.append(power(policies[int(np.argmin(p_values))]))
    assert np.mean(found) > np.mean(least) and np.mean(found) > 0.85 * best


def test_without_a_confidence_there_is_one_policy():
    answers = judged([-1.0] * 5, [True] * 5)
    assert rank(answers, DoorPolicy(), 0.1, 0.9, 50) == [DoorPolicy(min_confidence=1.0)]


def test_the_order_goes_to_ever_looser_ones():
    ranked = rank(drawn(np.random.default_rng(1), 300), DoorPolicy(tau_c=0.7), 0.2, 0.9, 300)
    thresholds = [policy.min_confidence for policy in ranked]
    assert thresholds == sorted(thresholds, reverse=True) and len(set(thresholds)) == len(thresholds)
    assert all(policy.tau_c == 0.7 for policy in ranked)


def test_tests_end_at_the_first_policy_that_fails():
    """The order was fixed beforehand: a later policy has no say, however good it looks."""
    answers = judged([0.9] * 100 + [0.1] * 100, [True] * 100 + [False] * 100)
    good, bad = DoorPolicy(min_confidence=0.5), DoorPolicy(min_confidence=0.0)
    assert passing_policies(answers, [good, bad, good], 0.05, 0.95) == ([good], 2)
    assert passing_policies(answers, [bad, good], 0.05, 0.95) == ([], 1)
    assert passing_policies(answers, [good, good], 0.05, 0.95) == ([good, good], 2)


def test_many_policies_a_hair_over_keep_the_promise():
    """Forty thresholds with a risk of 0.22 each, of which 0.2 is allowed: testing on after a failure would pass one."""
    rng, allowed, confidence, runs = np.random.default_rng(1), 0.2, 0.8, 200
    policies = [DoorPolicy(min_confidence=place / 40) for place in range(40)]
    broken = 0
    for _ in range(runs):
        answers = judged(rng.integers(0, 40, 120) / 40, rng.random(120) >= 0.22)
        passed, _ = passing_policies(answers, policies, allowed, confidence)
        broken += bool(passed)
    assert 0 < broken / runs <= 1 - confidence


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
    answers = judge(verdicts, [True] * len(verdicts), policy)
    assert answers.opens(policy).tolist() == [door(verdict, policy) == "converge" for verdict in verdicts]


def verdict(proximity=0.1, grounded=None):
    return ReasonVerdict(
        converged=True, depth=2.0, proximity=proximity, grounded=grounded, stable="contract", reason="confident",
        confidence=0.9,
    )  # fmt: skip


def test_vetoes_stay_where_they_shut_nothing_right():
    verdicts = [verdict()] * 300 + [verdict(proximity=0.9, grounded=0.0)] * 50
    right = np.array([True] * 300 + [False] * 50)
    assert fit_vetoes(verdicts, right, DoorPolicy()) == DoorPolicy()
    strict = DoorPolicy(tau_c=0.2, tau_g=0.9)
    assert fit_vetoes(verdicts, right, strict) == strict


@pytest.mark.parametrize("grounded, tau_g", [(0.5, 0.25), (0.2, 0.0), (0.0, None), (0.6, 0.5)])
def test_a_veto_of_grounding_that_shuts_out_right_answers_is_loosened(grounded, tau_g):
    verdicts = [verdict()] * 150 + [verdict(grounded=grounded)]
    found = fit_vetoes(verdicts, np.ones(151, dtype=bool), DoorPolicy())
    assert found == DoorPolicy(tau_g=tau_g)
    # one right answer of 1,001 may be shut out
    many = fit_vetoes([verdict()] * 1000 + [verdict(grounded=grounded)], np.ones(1001, dtype=bool), DoorPolicy())
    assert many == DoorPolicy()


def test_a_veto_of_repetition_likewise():
    verdicts = [verdict()] * 50 + [verdict(proximity=0.7)]
    assert fit_vetoes(verdicts, np.ones(51, dtype=bool), DoorPolicy()) == DoorPolicy(tau_c=0.8)


def test_figures_of_a_policy():
    answers = judged([0.9, 0.8, 0.7, 0.2, -1.0], [True, False, True, False, False], [False, False, True, False, False])
    check = check_policy(answers, DoorPolicy(min_confidence=0.75))
    assert (check.prompts, check.right.value, check.opened.value) == (5, 0.4, 0.4)
    assert (check.right_of_opened.value, check.opened_of_right.value) == (0.5, 0.5)
    assert check.auroc == pytest.approx(5 / 6)
    assert check.brier == pytest.approx((0.1**2 + 0.8**2 + 0.3**2 + 0.2**2 + 0.0) / 5)
    with pytest.raises(ValueError, match="no answers"):
        check_policy(judged([], []), DoorPolicy())
