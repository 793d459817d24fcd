"""Scores of doubt: figures of known cases, and differences of paired scores."""

import numpy as np
import pytest

from sigma0.bench.pocket.prompts import micro_world
from sigma0.bench.verdict.scores import auroc_more, doubts, separate


def test_figures_of_a_score():
    doubt, wrong = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 0.0, 1.0, 0.0])
    told = separate(doubt, wrong)
    assert told.auroc.value == pytest.approx(2 / 3) and told.auroc.interval[0] <= 2 / 3 <= told.auroc.interval[1]
    assert told.aurc == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert told.excess_aurc == pytest.approx(told.aurc - (1 / 4) / 4)
    assert told.augrc == pytest.approx((0 + 0 + 1 / 4 + 1 / 4) / 4)
    assert told.coverage == 0.5
    assert separate(doubt, np.ones(4)).coverage == 0.0 and separate(doubt, np.zeros(4)).auroc is None


def test_paired_differences_are_narrower_than_their_parts():
    rng = np.random.default_rng(0)
    doubt, wrong = rng.normal(size=400), rng.random(400) < 0.3
    doubt += wrong
    wrong = wrong.astype(float)
    other = doubt + 0.1 * rng.normal(size=400)
    more, alone = auroc_more(doubt, other, wrong), separate(doubt, wrong).auroc
    assert more.value == pytest.approx(alone.value - separate(other, wrong).auroc.value)
    assert more.interval[1] - more.interval[0] < 0.2 * (alone.interval[1] - alone.interval[0])
    assert auroc_more(doubt, doubt, wrong).interval == (0, 0) and auroc_more(doubt, other, wrong * 0) is None


def test_scores_are_read_off_the_runs(asker):
    answers = asker.answers(list(micro_world(4, "test", 9)))
    told = doubts(answers)
    for place, run in enumerate(answers.runs):
        assert told["confidence"][place] == pytest.approx(1 - run.verdict.confidence)
        assert told["mean entropy"][place] == pytest.approx(np.mean([token.entropy for token in run.tokens]))
        assert told["minimum margin"][place] == pytest.approx(1 - min(token.margin for token in run.tokens))
        assert told["mean depth"][place] == pytest.approx(run.verdict.depth / run.total_loops)
        assert told["length"][place] == len(run.tokens)
    assert len(set(told["random"])) == 4
