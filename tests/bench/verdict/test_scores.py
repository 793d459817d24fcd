"""Scores of doubt against brute force over every order of tied scores, known cases, and features whose law is known."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict import scores as scoring
from sigma0.bench.verdict.tables import draw_features
from sigma0.calibrate.confidence import fit_confidence
from sigma0.signals.evidence import FEATURES


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_ties_count_as_the_mean_over_all_their_orders(answers):
    doubt, wrong = (np.array(item, dtype=float) for item in zip(*answers, strict=True))
    orders = [order for order in permutations(range(len(doubt))) if list(doubt[list(order)]) == sorted(doubt)]
    kept = np.mean([np.cumsum(wrong[list(order)]) for order in orders], axis=0)
    np.testing.assert_allclose(scoring.wrong_among_kept(doubt, wrong), kept, atol=1e-12)
    assert scoring.aurc(doubt, wrong) == pytest.approx(np.mean(kept / np.arange(1, len(doubt) + 1)))
    assert scoring.augrc(doubt, wrong) == pytest.approx(np.mean(kept) / len(doubt))
    bad, good = doubt[wrong == 1], doubt[wrong == 0]
    pairs = (bad[:, None] > good[None]) + 0.5 * (bad[:, None] == good[None])
    assert scoring.auroc(doubt, wrong) == (pytest.approx(pairs.mean()) if pairs.size else None)


def test_figures_of_a_score():
    doubt, wrong = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 0.0, 1.0, 0.0])
    output, area = scoring.separate(doubt, wrong), scoring.measure_abstention(doubt, wrong, resamples=200)
    assert output.auroc.value == pytest.approx(2 / 3) and output.auroc.interval[0] <= 2 / 3 <= output.auroc.interval[1]
    assert output.aurc == area.aurc.value == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert output.excess_aurc == pytest.approx(output.aurc - (1 / 4) / 4)
    assert output.augrc == area.augrc.value == pytest.approx((0 + 0 + 1 / 4 + 1 / 4) / 4)
    assert area.auroc.value == output.auroc.value and area.aurc.interval[0] < output.aurc < area.aurc.interval[1]
    assert output.coverage == 0.5
    assert scoring.separate(doubt, np.ones(4)).coverage == 0.0 and scoring.separate(doubt, np.zeros(4)).auroc is None
    for scores, answers in ((0, 0), (2, 1)):
        with pytest.raises(ValueError, match=f"{scores} scores for {answers} answers"):
            scoring.measure_abstention(np.zeros(scores), np.zeros(answers))


def test_paired_differences_are_narrower_than_their_parts():
    rng = np.random.default_rng(0)
    wrong = (rng.random(400) < 0.3).astype(float)
    doubt = rng.normal(size=400) + wrong
    other = doubt + 0.1 * rng.normal(size=400)
    more, alone = scoring.auroc_more(doubt, other, wrong), scoring.separate(doubt, wrong).auroc
    assert more.value == pytest.approx(alone.value - scoring.separate(other, wrong).auroc.value)
    assert more.interval[1] - more.interval[0] < 0.2 * (alone.interval[1] - alone.interval[0])
    assert scoring.auroc_more(doubt, other, wrong * 0) is None


def test_scores_are_read_off_the_runs(asker):
    answers = asker.answers(list(micro_world(4, "test", 9)))
    output = scoring.doubts(answers)
    for place, run in enumerate(answers.runs):
        assert output["confidence"][place] == pytest.approx(1 - run.verdict.confidence)
        assert output["mean entropy"][place] == pytest.approx(np.mean([token.entropy for token in run.tokens]))
        assert output["minimum margin"][place] == pytest.approx(1 - min(token.margin for token in run.tokens))
        assert output["mean depth"][place] == pytest.approx(run.verdict.depth / run.total_loops)
        assert output["length"][place] == len(run.tokens)
    assert len(set(output["random"])) == 4


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    evidence = np.exp(rng.normal(-2, 1.5, (n, len(FEATURES))))
    evidence[:, FEATURES.index("length")] = rng.integers(1, 20, n)
    entropy, doubt = (np.log(evidence[:, FEATURES.index(name)]) for name in ("mean_entropy", "most_doubt"))
    return SimpleNamespace(evidence=evidence, right=rng.random(n) < 1 / (1 + np.exp(entropy + 0.3 * doubt + 1)))


@pytest.mark.exhaustive
def test_what_is_read_loses_and_what_is_not_does_not(tmp_path):
    fit, held = drawn(2000, 0), drawn(1000, 1)
    fitted = fit_confidence(fit.evidence, fit.right, [[1, 2]] * 2000)
    held.evidence[0, FEATURES.index("mean_depth")] = np.nan
    uses = {use.name: use for use in scoring.feature_uses(held, fitted.model)}
    assert list(uses) == list(FEATURES)
    assert {name for name, use in uses.items() if use.stored} == set(fitted.model.features)
    first, second = uses["mean_entropy"], uses["most_doubt"]
    assert first.drop.value > second.drop.value > 0.0 and first.drop.interval[0] <= first.drop.value
    assert first.auroc > second.auroc > 0.55
    assert uses["length"].drop is None and uses["length"].auroc == pytest.approx(0.5, abs=0.06)
    assert uses["mean_depth"].auroc is None
    assert not any(use.stored for use in scoring.feature_uses(held, None))
    file = tmp_path / "features.svg"
    draw_features(list(uses.values()), fitted.figures, file, "pocket")
    assert file.stat().st_size > 10_000
