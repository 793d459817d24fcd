"""Fitting a confidence, choice by choice: on few features that differ, so that each is quick."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold

from sigma0.calibrate.confidence import (
    MOST_PAIRS,
    calibration_error,
    cross_fitted,
    familiar_pairs,
    fit_confidence,
    log_losses,
)
from sigma0.signals.confidence import new_share, pair_codes
from sigma0.signals.evidence import FEATURES

COLUMNS = [FEATURES.index(f"mean_{sign}") for sign in ("entropy", "doubt", "depth", "proximity", "deepest_entropy")]


def world(weights, n=1200, seed=0, mixes=None):
    """Evidence whose logarithms are normal in a few columns and constant in the others, and answers that follow it.

    Args:
        weights: Of each column's logarithm in the doubt.
        n: Answers.
        seed: Of the draw.
        mixes: A matrix that makes the columns of independent ones.
    """
    rng = np.random.default_rng(seed)
    logs = rng.standard_normal((n, len(weights)))
    right = rng.random(n) < 1 / (1 + np.exp(logs @ np.array(weights, dtype=float)))
    evidence = np.ones((n, len(FEATURES)))
    evidence[:, COLUMNS[: len(weights)]] = np.exp(logs if mixes is None else logs @ np.array(mixes, dtype=float).T)
    return evidence, right


def fitted(evidence, right):
    return fit_confidence(evidence, right, [[1, 2]] * len(right))


def names(*places):
    return {FEATURES[COLUMNS[place]] for place in places}


def test_four_features_at_most_are_read():
    model = fitted(*world([2.0, 2.0, 2.0, 2.0, 2.0])).model
    assert len(model.features) == len(model.weights) == len(model.most) == 4


def test_what_loses_its_weight_to_later_features_is_not_read():
    """The first column is the sum of three others and of what speaks against doubt: alone it says the most."""
    mixes = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    found = fitted(*world([1.5, 1.5, 1.5, -0.5], mixes=mixes))
    assert set(found.model.features) == names(1, 2, 3) and min(found.model.weights) > 0
    assert len(found.model.weights) == len(found.model.most) == 3
    told = {figure.name: figure for figure in found.figures}
    (first,) = names(0)
    assert not told[first].chosen and told[first].gain == max(
        figure.gain for figure in found.figures if figure.gain is not None
    )


def test_the_first_feature_needs_a_gain_and_a_further_one_two_errors():
    evidence, right = world([1.0, 0.0])
    found = fitted(evidence, right)
    assert set(found.model.features) == names(0)
    base = log_losses(np.full(len(right), right.mean()), right)
    logs = np.log(evidence[:, COLUMNS[:2]] + 1e-4)
    alone = log_losses(cross_fitted(logs[:, :1], right), right)
    both = log_losses(cross_fitted(logs, right), right)
    told = {figure.name: figure for figure in found.figures}
    for place, gains in ((0, base - alone), (1, alone - both)):
        figure = told[FEATURES[COLUMNS[place]]]
        assert figure.gain == pytest.approx(gains.mean(), rel=1e-6)
        assert figure.error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5, rel=1e-6)
    (second,) = names(1)
    assert told[second].gain < 2 * told[second].error


@pytest.mark.parametrize("weight, read", [(0.35, False), (0.5, True)])
def test_a_further_feature_is_read_from_two_errors_on(weight, read):
    """Its gain is between one and two errors, or between two and three."""
    told = {figure.name: figure for figure in fitted(*world([1.0, weight], n=400, seed=2)).figures}
    (second,) = names(1)
    assert told[second].chosen is read and (1 + read) < told[second].gain / told[second].error < 2 + read


def test_five_of_a_kind_are_enough():
    evidence, _ = world([1.0], n=50)
    right = np.argsort(evidence[:, COLUMNS[0]]).argsort() < 5
    assert fitted(evidence, right).model.answers == 50
    assert fitted(np.exp(-np.log(evidence)), ~right).model.answers == 50
    for few in (right & (np.cumsum(right) > 1), ~(right & (np.cumsum(right) > 1))):
        with pytest.raises(ValueError, match="at least 5 right and 5 wrong"):
            fitted(evidence, few)


def test_an_answers_confidence_is_that_of_a_fit_on_the_other_fifths():
    evidence, right = world([1.0, 0.7], n=200)
    logs = 0.2 * np.log(evidence[:, COLUMNS[:2]])
    expected = np.empty(200)
    for fitting, rest in KFold(5, shuffle=True, random_state=0).split(logs):
        scale = logs[fitting].std(0)
        fit = LogisticRegression(solver="newton-cholesky").fit(logs[fitting] / scale, right[fitting])
        expected[rest] = fit.predict_proba(logs[rest] / scale)[:, 1]
    assert cross_fitted(logs, right) == pytest.approx(expected, rel=1e-6)


def test_a_fold_of_one_kind_has_its_share():
    right = np.ones(10, dtype=bool)
    logs = np.arange(10.0)[:, None]
    assert cross_fitted(logs, right).tolist() == [1.0] * 10 and cross_fitted(logs, ~right).tolist() == [0.0] * 10


def test_a_fit_is_not_shaken_by_what_is_far_off():
    logs, right = np.arange(40.0)[:, None], np.arange(40) < 20
    logs[0] = -1e6
    told = cross_fitted(logs, right)
    assert np.isfinite(told).all() and told[0] == pytest.approx(1.0)


def test_a_loss_is_bounded_by_a_chance_of_a_millionth():
    losses = log_losses(np.array([0.0, 1.0, 1e-3, 0.5]), np.array([True, False, True, False]))
    assert losses == pytest.approx(-np.log([1e-6, 1e-6, 1e-3, 0.5]))


def test_a_calibration_error_is_over_ten_parts():
    told = np.linspace(0.005, 0.995, 100)
    right = np.arange(100) % 2 == 0
    parts = [abs(told[k : k + 10].mean() - 0.5) for k in range(0, 100, 10)]
    assert calibration_error(told, right) == pytest.approx(np.mean(parts))
    # fewer answers than parts, and in any order
    assert calibration_error(np.array([0.9, 0.2, 0.4]), np.array([True, False, False])) == pytest.approx(0.7 / 3)


def test_new_pairs_are_counted_against_the_other_fifths():
    prompts = [[1, 2, 3, 4, 5]] * 8 + [[1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    assert familiar_pairs(prompts) == (
        tuple(sorted(set(pair_codes([1, 2, 3, 4, 5]) + pair_codes([4, 6]) + pair_codes([4, 7])))), 0.25,
    )  # fmt: skip
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 18, 40).tolist() for _ in range(30)]
    shares = np.empty(30)
    for fitting, rest in KFold(5, shuffle=True, random_state=0).split(shares):
        known = frozenset(code for place in fitting for code in pair_codes(prompts[place]))
        shares[rest] = [new_share(prompts[place], known) for place in rest]
    assert 0 < max(shares) <= 0.25 and familiar_pairs(prompts)[1] == max(shares)


def test_one_prompt_in_five_hundred_may_be_stranger():
    """Of 501 the greatest share is left out, and the second counts."""
    prompts = [[1, 2, 3, 4, 5, 6]] * 499 + [[1, 2, 3, 4, 5, 7], [1, 2, 3, 8, 9, 10]]
    assert familiar_pairs(prompts)[1] == 0.2


def test_prompts_that_are_a_little_too_new_tell_nothing():
    assert familiar_pairs([[1, 2, 3, 4, place] for place in range(10, 20)])[1] == 0.25
    assert familiar_pairs([[1, 2, 3, place] for place in range(10, 20)]) == (None, 0.0)


@pytest.mark.parametrize("pairs, known", [(MOST_PAIRS, True), (MOST_PAIRS + 1, False)])
def test_pairs_are_kept_up_to_a_number(pairs, known):
    assert MOST_PAIRS == 50_000
    found, most = familiar_pairs([range(pairs + 1)] * 5)
    assert most == 0.0 and (found is not None) is known


@pytest.mark.parametrize("prompts, known", [(4, False), (5, True)])
def test_fewer_prompts_than_folds_have_no_familiar_pairs(prompts, known):
    assert (familiar_pairs([[1, 2]] * prompts)[0] is not None) is known
