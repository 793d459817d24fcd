"""Fitting a confidence: on answers whose chances are known."""

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
from sigma0.signals.confidence import new_share, pair_codes, transformed
from sigma0.signals.evidence import FEATURES

ENTROPY, SURPRISE, DEPTH = (FEATURES.index(name) for name in ("mean_entropy", "mean_deepest_surprise", "mean_depth"))


def drawn(n, seed=0, weights=((ENTROPY, 0.8), (SURPRISE, 0.6)), bias=-1.0):
    """Evidence of answers, their true chances of being right, and which are."""
    rng = np.random.default_rng(seed)
    evidence = np.exp(rng.normal(-2, 1.5, (n, len(FEATURES))))
    evidence[:, FEATURES.index("length")] = rng.integers(1, 20, n)
    doubt = sum(weight * transformed(evidence[:, column]) for column, weight in weights) - bias
    chances = 1 / (1 + np.exp(doubt))
    return evidence, chances, rng.random(n) < chances


def fitted(evidence, right):
    return fit_confidence(evidence, right, [[1, 2, 3]] * len(right))


@pytest.mark.slow
def test_the_fit_finds_the_law_of_the_data():
    evidence, _, right = drawn(3000)
    model = fitted(evidence, right).model
    assert set(model.features) == {"mean_entropy", "mean_deepest_surprise"}
    weights = dict(zip(model.features, model.weights, strict=True))
    assert weights["mean_entropy"] == pytest.approx(0.8, abs=0.15)
    assert weights["mean_deepest_surprise"] == pytest.approx(0.6, abs=0.15)
    fresh, true, _ = drawn(500, seed=1)
    output = np.array([model.confidence(row) for row in fresh])
    assert np.abs(output - true).max() < 0.08


@pytest.mark.slow
def test_what_it_stores_is_what_was_seen():
    evidence, _, right = drawn(600)
    result = fitted(evidence, right)
    model = result.model
    columns = [FEATURES.index(name) for name in model.features]
    assert model.most == pytest.approx(evidence[:, columns].max(0))
    assert model.longest == evidence[:, FEATURES.index("length")].max()
    assert model.answers == 600 and model.pairs == tuple(sorted(pair_codes([1, 2, 3])))
    current = [model.confidence(row) for row in evidence]
    assert model.deciles == pytest.approx(np.quantile(current, np.arange(1, 10) / 10))
    above = result.cross_fitted[right][:, None] > result.cross_fitted[~right][None]
    assert model.auroc == pytest.approx(above.mean())
    assert model.brier == pytest.approx(((result.cross_fitted - right) ** 2).mean())


def test_features_that_are_unknown_or_tell_nothing_are_left_out():
    evidence, _, right = drawn(1000)
    evidence[3, SURPRISE] = np.nan
    result = fitted(evidence, right)
    assert "mean_deepest_surprise" not in result.model.features
    (figure,) = (item for item in result.figures if item.name == "mean_deepest_surprise")
    assert (figure.auroc, figure.gain, figure.chosen) == (None, None, False)
    evidence, _, _ = drawn(100)
    right = np.arange(100) % 2 == 0
    assert fitted(np.ones_like(evidence), right) is None
    # a single feature, which falls with doubt: its weight would be below 0
    turned = np.ones_like(evidence)
    turned[:, ENTROPY] = np.where(right, 2.0, 0.1)
    assert fitted(turned, right) is None


@pytest.mark.slow
def test_of_equal_features_one_is_tried():
    evidence, _, right = drawn(400)
    evidence[:, FEATURES.index("worst_entropy")] = evidence[:, FEATURES.index("most_entropy")]
    figures = {figure.name: figure for figure in fitted(evidence, right).figures}
    assert figures["most_entropy"].gain is not None and figures["worst_entropy"].gain is None
    assert figures["most_entropy"].auroc == figures["worst_entropy"].auroc


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_sign_that_is_constant_in_a_fold_has_no_weight_there():
    evidence, _, right = drawn(300)
    rare = np.zeros(300)
    rare[7] = 1.0
    evidence[:, FEATURES.index("mean_diverge")] = rare
    assert "mean_diverge" not in fitted(evidence, right).model.features
    logs = transformed(rare[:, None])
    # the others do not differ, and so say nothing of it
    assert cross_fitted(logs, right)[7] == pytest.approx(right.mean(), abs=0.05)


COLUMNS = [FEATURES.index(f"mean_{sign}") for sign in ("entropy", "doubt", "depth", "proximity", "deepest_entropy")]


def world(weights, n=1200, seed=0, mixes=None):
    """Evidence, log-normal in a few columns, which `mixes` makes of independent ones, and answers that follow it."""
    rng = np.random.default_rng(seed)
    logs = rng.standard_normal((n, len(weights)))
    right = rng.random(n) < 1 / (1 + np.exp(logs @ np.array(weights, dtype=float)))
    evidence = np.ones((n, len(FEATURES)))
    evidence[:, COLUMNS[: len(weights)]] = np.exp(logs if mixes is None else logs @ np.array(mixes, dtype=float).T)
    return evidence, right


def names(*places):
    return {FEATURES[COLUMNS[place]] for place in places}


def test_four_features_at_most_are_read_and_five_answers_of_a_kind_are_enough():
    model = fitted(*world([2.0, 2.0, 2.0, 2.0, 2.0])).model
    assert len(model.features) == len(model.weights) == len(model.most) == 4
    evidence, _ = world([1.0], n=50)
    right = np.argsort(evidence[:, COLUMNS[0]]).argsort() < 5
    assert fitted(evidence, right).model.answers == 50
    assert fitted(np.exp(-np.log(evidence)), ~right).model.answers == 50
    for few in (right & (np.cumsum(right) > 1), ~(right & (np.cumsum(right) > 1))):
        with pytest.raises(ValueError, match="at least 5 right and 5 wrong"):
            fitted(evidence, few)


def test_what_loses_its_weight_to_later_features_is_not_read():
    """The first column is the sum of three others and of what speaks against doubt: alone it says the most."""
    mixes = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    result = fitted(*world([1.5, 1.5, 1.5, -0.5], mixes=mixes))
    assert set(result.model.features) == names(1, 2, 3) and min(result.model.weights) > 0
    assert len(result.model.weights) == len(result.model.most) == 3
    output = {figure.name: figure for figure in result.figures}
    (first,) = names(0)
    assert not output[first].chosen and output[first].gain == max(
        figure.gain for figure in result.figures if figure.gain is not None
    )


def test_the_first_feature_needs_a_gain_and_a_further_one_two_errors():
    evidence, right = world([1.0, 0.0])
    result = fitted(evidence, right)
    assert set(result.model.features) == names(0)
    base = log_losses(np.full(len(right), right.mean()), right)
    logs = np.log(evidence[:, COLUMNS[:2]] + 1e-4)
    alone = log_losses(cross_fitted(logs[:, :1], right), right)
    both = log_losses(cross_fitted(logs, right), right)
    output = {figure.name: figure for figure in result.figures}
    for place, gains in ((0, base - alone), (1, alone - both)):
        figure = output[FEATURES[COLUMNS[place]]]
        assert figure.gain == pytest.approx(gains.mean(), rel=1e-6)
        assert figure.error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5, rel=1e-6)
    (second,) = names(1)
    assert output[second].gain < 2 * output[second].error


@pytest.mark.parametrize("weight, read", [(0.35, False), (0.5, True)])
def test_a_further_feature_is_read_from_two_errors_on(weight, read):
    """Its gain is between one and two errors, or between two and three."""
    output = {figure.name: figure for figure in fitted(*world([1.0, weight], n=400, seed=2)).figures}
    (second,) = names(1)
    assert output[second].chosen is read and (1 + read) < output[second].gain / output[second].error < 2 + read


def test_an_answers_confidence_is_that_of_a_fit_on_the_other_fifths():
    evidence, right = world([1.0, 0.7], n=200)
    logs = 0.2 * np.log(evidence[:, COLUMNS[:2]])
    expected = np.empty(200)
    for fitting, rest in KFold(5, shuffle=True, random_state=0).split(logs):
        scale = logs[fitting].std(0)
        fit = LogisticRegression(solver="newton-cholesky").fit(logs[fitting] / scale, right[fitting])
        expected[rest] = fit.predict_proba(logs[rest] / scale)[:, 1]
    assert cross_fitted(logs, right) == pytest.approx(expected, rel=1e-6)


def test_a_fold_of_one_kind_has_its_share_and_what_is_far_off_shakes_no_fit():
    right = np.ones(10, dtype=bool)
    logs = np.arange(10.0)[:, None]
    assert cross_fitted(logs, right).tolist() == [1.0] * 10 and cross_fitted(logs, ~right).tolist() == [0.0] * 10
    logs, right = np.arange(40.0)[:, None], np.arange(40) < 20
    logs[0] = -1e6
    output = cross_fitted(logs, right)
    assert np.isfinite(output).all() and output[0] == pytest.approx(1.0)


def test_losses_and_calibration_errors_are_their_definitions():
    losses = log_losses(np.array([0.0, 1.0, 1e-3, 0.5]), np.array([True, False, True, False]))
    assert losses == pytest.approx(-np.log([1e-6, 1e-6, 1e-3, 0.5]))
    output = np.linspace(0.005, 0.995, 100)
    right = np.arange(100) % 2 == 0
    parts = [abs(output[k : k + 10].mean() - 0.5) for k in range(0, 100, 10)]
    assert calibration_error(output, right) == pytest.approx(np.mean(parts))
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


def test_one_prompt_in_five_hundred_may_be_stranger_and_others_a_little_new():
    # of 501 the greatest share is left out, and the second counts
    prompts = [[1, 2, 3, 4, 5, 6]] * 499 + [[1, 2, 3, 4, 5, 7], [1, 2, 3, 8, 9, 10]]
    assert familiar_pairs(prompts)[1] == 0.2
    # pairs are kept up to a number, and of no fewer prompts than folds
    assert MOST_PAIRS == 50_000
    for prompts, known in (
        *[([range(pairs + 1)] * 5, pairs == MOST_PAIRS) for pairs in (MOST_PAIRS, MOST_PAIRS + 1)],
        *[([[1, 2]] * few, few == 5) for few in (4, 5)],
    ):
        result, most = familiar_pairs(prompts)
        assert most == 0.0 and (result is not None) is known
    assert familiar_pairs([[1, 2, 3, 4, place] for place in range(10, 20)])[1] == 0.25
    assert familiar_pairs([[1, 2, 3, place] for place in range(10, 20)]) == (None, 0.0)
