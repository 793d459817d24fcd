"""Fitting a confidence: on answers whose chances are known."""

import numpy as np
import pytest

from sigma0.calibrate.confidence import (
    calibration_error,
    cross_fitted,
    familiar_pairs,
    fit_confidence,
    log_losses,
)
from sigma0.signals.confidence import pair_codes, transformed
from sigma0.signals.drift import DriftMonitor
from sigma0.signals.evidence import FEATURES
from sigma0.signals.verdict import of_token

ENTROPY, SURPRISE, DEPTH = (FEATURES.index(name) for name in ("mean_entropy", "mean_deepest_surprise", "mean_depth"))


def drawn(n, seed=0, weights=((ENTROPY, 0.8), (SURPRISE, 0.6)), bias=-1.0):
    """Evidence of answers, their true chances of being right, and which are."""
    rng = np.random.default_rng(seed)
    evidence = np.exp(rng.normal(-2, 1.5, (n, len(FEATURES))))
    evidence[:, FEATURES.index("length")] = rng.integers(1, 20, n)
    doubt = sum(weight * transformed(evidence[:, column]) for column, weight in weights) - bias
    chances = 1 / (1 + np.exp(doubt))
    return evidence, chances, rng.random(n) < chances


PROMPTS = [[1, 2, 3]] * 3000


@pytest.mark.slow
def test_the_fit_finds_the_law_of_the_data():
    evidence, _, right = drawn(3000)
    model = fit_confidence(evidence, right, PROMPTS[:3000]).model
    assert set(model.features) == {"mean_entropy", "mean_deepest_surprise"}
    weights = dict(zip(model.features, model.weights, strict=True))
    assert weights["mean_entropy"] == pytest.approx(0.8, abs=0.15)
    assert weights["mean_deepest_surprise"] == pytest.approx(0.6, abs=0.15)
    fresh, true, _ = drawn(500, seed=1)
    told = np.array([model.confidence(row) for row in fresh])
    assert np.abs(told - true).max() < 0.08


@pytest.mark.slow
def test_what_it_stores_is_what_was_seen():
    evidence, _, right = drawn(600)
    fitted = fit_confidence(evidence, right, PROMPTS[:600])
    model = fitted.model
    columns = [FEATURES.index(name) for name in model.features]
    assert model.most == pytest.approx(evidence[:, columns].max(0))
    assert model.longest == evidence[:, FEATURES.index("length")].max()
    assert model.answers == 600 and model.pairs == tuple(sorted(pair_codes([1, 2, 3])))
    own = [model.confidence(row) for row in evidence]
    assert model.deciles == pytest.approx(np.quantile(own, np.arange(1, 10) / 10))
    above = fitted.cross_fitted[right][:, None] > fitted.cross_fitted[~right][None]
    assert model.auroc == pytest.approx(above.mean())
    assert model.brier == pytest.approx(((fitted.cross_fitted - right) ** 2).mean())


def test_answers_like_those_of_the_fit_do_not_drift_where_they_bunch():
    def bunched(n, seed):
        """Half of the answers without a doubt, as of a model that is mostly sure."""
        evidence, _, _ = drawn(n, seed)
        evidence[::2] *= 1e-4
        evidence[:, FEATURES.index("length")] = 5
        chances = 1 / (1 + np.exp(transformed(evidence[:, ENTROPY]) + 1.0))
        return evidence, np.random.default_rng(seed).random(n) < chances

    model = fit_confidence(*bunched(600, 0), PROMPTS[:600]).model
    drift = DriftMonitor(model)
    for row in bunched(1000, 1)[0]:
        sure = model.confidence(row)
        drift.add(of_token("confident", 1, None, 0.0).model_copy(update={"confidence": sure}))
    assert drift.psi < 0.1


def test_a_feature_that_adds_nothing_is_left_out_with_its_figure():
    evidence, _, right = drawn(1200, weights=((ENTROPY, 1.0),))
    figures = {figure.name: figure for figure in fit_confidence(evidence, right, PROMPTS[:1200]).figures}
    assert [name for name, figure in figures.items() if figure.chosen] == ["mean_entropy"]
    assert figures["mean_entropy"].gain > 10 * figures["mean_entropy"].error
    assert figures["mean_depth"].gain < 2 * figures["mean_depth"].error
    assert figures["mean_depth"].auroc == pytest.approx(0.5, abs=0.05)


def test_a_feature_of_trust_gets_no_weight():
    """What falls with doubt would need a weight below 0, and is dropped."""
    evidence, _, right = drawn(1000, weights=((ENTROPY, 1.0), (DEPTH, -1.0)))
    assert "mean_depth" not in fit_confidence(evidence, right, PROMPTS[:1000]).model.features


def test_unknown_features_are_left_out():
    evidence, _, right = drawn(1000)
    evidence[3, SURPRISE] = np.nan
    fitted = fit_confidence(evidence, right, PROMPTS[:1000])
    assert "mean_deepest_surprise" not in fitted.model.features
    (figure,) = (each for each in fitted.figures if each.name == "mean_deepest_surprise")
    assert (figure.auroc, figure.gain, figure.chosen) == (None, None, False)


def test_too_few_of_a_kind_are_refused():
    evidence, _, _ = drawn(50)
    with pytest.raises(ValueError, match="50 of 50 answers are right"):
        fit_confidence(evidence, np.ones(50, dtype=bool), PROMPTS[:50])
    with pytest.raises(ValueError, match="4 of 50 answers are right"):
        fit_confidence(evidence, np.arange(50) < 4, PROMPTS[:50])


def test_cross_fitting_gives_no_answer_a_fit_that_has_seen_it():
    """Labels by chance: a fit that had seen them would tell them."""
    rng = np.random.default_rng(3)
    logs, right = rng.normal(size=(40, 12)), rng.random(40) < 0.5
    told = cross_fitted(np.repeat(logs, 1, axis=0), right)
    flipped = right.copy()
    flipped[7] = ~right[7]
    # the answer's own label has no say in its confidence
    assert cross_fitted(logs, flipped)[7] == pytest.approx(told[7], abs=1e-12)


def test_losses_and_calibration_errors_are_their_definitions():
    confidence, right = np.array([0.9, 0.2, 0.0, 1.0]), np.array([True, False, False, False])
    assert log_losses(confidence, right)[:3] == pytest.approx(-np.log([0.9, 0.8, 1.0]))
    assert np.isfinite(log_losses(confidence, right)).all()
    told = np.repeat([0.2, 0.8], 50)
    fits = np.concatenate([np.arange(50) < 10, np.arange(50) < 30])
    assert calibration_error(told, fits, bins=2) == pytest.approx((0.0 + 0.2) / 2)


def test_familiar_pairs_of_a_narrow_world():
    rng = np.random.default_rng(0)
    prompts = [[int(first), 10 + int(second)] for first, second in rng.integers(0, 5, (500, 2))]
    pairs, most = familiar_pairs(prompts)
    assert len(pairs) == 25 and most == 0.0


def test_prompts_that_share_little_have_no_familiar_pairs():
    rng = np.random.default_rng(0)
    assert familiar_pairs(rng.integers(0, 1000, (200, 8)).tolist()) == (None, 0.0)
    assert familiar_pairs([[1, 2]] * 3) == (None, 0.0)


@pytest.mark.slow
def test_of_equal_features_one_is_tried():
    evidence, _, right = drawn(400)
    evidence[:, FEATURES.index("worst_entropy")] = evidence[:, FEATURES.index("most_entropy")]
    figures = {figure.name: figure for figure in fit_confidence(evidence, right, PROMPTS[:400]).figures}
    assert figures["most_entropy"].gain is not None and figures["worst_entropy"].gain is None
    assert figures["most_entropy"].auroc == figures["worst_entropy"].auroc


def test_where_nothing_tells_right_from_wrong_there_is_no_confidence():
    evidence, _, _ = drawn(100)
    right = np.arange(100) % 2 == 0
    assert fit_confidence(np.ones_like(evidence), right, PROMPTS[:100]) is None
    # a single feature, which falls with doubt: its weight would be below 0
    turned = np.ones_like(evidence)
    turned[:, ENTROPY] = np.where(right, 2.0, 0.1)
    assert fit_confidence(turned, right, PROMPTS[:100]) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_sign_that_is_constant_in_a_fold_has_no_weight_there():
    evidence, _, right = drawn(300)
    rare = np.zeros(300)
    rare[7] = 1.0
    evidence[:, FEATURES.index("mean_diverge")] = rare
    fitted = fit_confidence(evidence, right, PROMPTS[:300])
    assert "mean_diverge" not in fitted.model.features
    logs = transformed(rare[:, None])
    # the others do not differ, and so say nothing of it
    assert cross_fitted(logs, right)[7] == pytest.approx(right.mean(), abs=0.05)
