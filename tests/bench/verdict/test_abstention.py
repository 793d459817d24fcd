"""Abstention figures against brute force over every order of tied scores, and known cases."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.verdict.abstention import augrc, aurc, auroc, measure_abstention, wrong_among_kept

ANSWERS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6)


def arrays(answers: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    doubt, wrong = zip(*answers, strict=True)
    return np.array(doubt, dtype=float), np.array(wrong, dtype=float)


@given(ANSWERS)
def test_ties_count_as_the_mean_over_all_their_orders(answers: list[tuple[int, bool]]) -> None:
    doubt, wrong = arrays(answers)
    orders = [order for order in permutations(range(len(doubt))) if list(doubt[list(order)]) == sorted(doubt)]
    kept = np.mean([np.cumsum(wrong[list(order)]) for order in orders], axis=0)
    np.testing.assert_allclose(wrong_among_kept(doubt, wrong), kept, atol=1e-12)
    coverage = np.arange(1, len(doubt) + 1)
    assert aurc(doubt, wrong) == pytest.approx(np.mean(kept / coverage))
    assert augrc(doubt, wrong) == pytest.approx(np.mean(kept) / len(doubt))


@given(ANSWERS)
def test_auroc_is_the_chance_that_a_wrong_answer_is_trusted_less(answers: list[tuple[int, bool]]) -> None:
    doubt, wrong = arrays(answers)
    bad, good = doubt[wrong == 1], doubt[wrong == 0]
    if not len(bad) or not len(good):
        assert auroc(doubt, wrong) is None
        return
    pairs = (bad[:, None] > good[None]) + 0.5 * (bad[:, None] == good[None])
    assert auroc(doubt, wrong) == pytest.approx(pairs.mean())


def test_a_perfect_score_a_constant_and_the_worst() -> None:
    wrong = np.array([0.0] * 8 + [1.0] * 2)
    perfect = measure_abstention(wrong, wrong, resamples=200)
    constant = measure_abstention(np.zeros(10), wrong, resamples=200)
    worst = measure_abstention(-wrong, wrong, resamples=200)
    assert perfect.auroc and constant.auroc and worst.auroc
    assert (perfect.auroc.value, constant.auroc.value, worst.auroc.value) == (1.0, 0.5, 0.0)
    assert perfect.aurc.value < constant.aurc.value < worst.aurc.value
    assert constant.aurc.value == pytest.approx(0.2)
    # Wrong answers come last: 1 among 9, 2 among 10.
    assert perfect.aurc.value == pytest.approx((1 / 9 + 2 / 10) / 10)
    assert perfect.augrc.value == pytest.approx((1 + 2) / 100)
    low, high = constant.aurc.interval
    assert 0 <= low < 0.2 < high <= 0.6


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 scores for 0 answers"):
        measure_abstention(np.array([]), np.array([]))
    with pytest.raises(ValueError, match="2 scores for 1 answers"):
        measure_abstention(np.zeros(2), np.zeros(1))


def test_all_right_has_no_auroc_and_no_risk() -> None:
    found = measure_abstention(np.arange(5.0), np.zeros(5), resamples=50)
    assert found.auroc is None
    assert found.aurc.value == found.augrc.value == 0.0
