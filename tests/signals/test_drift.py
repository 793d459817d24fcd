"""Drift of the latest answers, against its definition counted anew from all of them."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from sigma0.signals.drift import WINDOW, DriftMonitor
from sigma0.signals.verdict import of_token
from tests.signals.test_confidence import MODEL

# of few values, so that deciles are often equal, and confidences often lie on one
COARSE = st.integers(0, 8).map(lambda eighths: eighths / 8)


def answer(confidence, reason="confident"):
    return of_token(reason, 2, None, 0.0).model_copy(update={"confidence": confidence})


def monitor(deciles=MODEL.deciles, **settings):
    return DriftMonitor(replace(MODEL, deciles=tuple(sorted(deciles))), **settings)


def defined_psi(confidences, deciles):
    """By ten bins, closed at both ends: an answer on their edges is shared by all that it lies in."""
    bins = list(pairwise([-math.inf, *sorted(deciles), math.inf]))
    counts, expected = np.zeros(10), np.full(10, 0.1)
    for confidence in confidences:
        lies = np.array([low <= confidence <= high for low, high in bins])
        counts += lies / lies.sum()
    shares = (counts + expected) / (len(confidences) + 1)
    return entropy(shares, expected) + entropy(expected, shares)


@given(
    st.lists(COARSE | st.floats(0, 1), min_size=9, max_size=9),
    st.lists(st.tuples(st.none() | COARSE | st.floats(0, 1), st.booleans()), max_size=60),
    st.integers(1, 40),
)
def test_figures_are_those_of_the_latest_answers(deciles, answers, window):
    drift = monitor(deciles, window=window, fewest=5)
    for confidence, strange in answers:
        drift.add(answer(confidence, "out_of_calibration" if strange else "max_depth"))
    latest = answers[-window:]
    known = [confidence for confidence, _ in latest if confidence is not None]
    assert drift.out_of_calibration == (sum(strange for _, strange in latest) / len(latest) if latest else None)
    if len(known) < 5:
        assert drift.psi is None
    else:
        assert drift.psi == pytest.approx(defined_psi(known, deciles), abs=1e-12)
        assert drift.psi >= -1e-12


@pytest.mark.parametrize("top", [0.12, 0.45, 0.8])
def test_answers_that_bunch_at_the_highest_confidence_are_no_drift(top):
    draws = np.random.default_rng(2)
    calibration = np.where(draws.random(4000) < top, 0.99, draws.random(4000) * 0.99)
    drift = monitor(np.quantile(calibration, np.arange(1, 10) / 10).tolist())
    for confidence in draws.permutation(calibration)[:WINDOW]:
        drift.add(answer(float(confidence)))
    assert drift.psi < 0.1


def test_a_thousand_answers_are_remembered_and_a_hundred_are_enough():
    drift = monitor()
    drift.add(answer(0.5, "out_of_calibration"))
    for _ in range(98):
        drift.add(answer(0.5))
    assert drift.psi is None
    drift.add(answer(0.5))
    assert drift.psi is not None and drift.out_of_calibration == 0.01
    for _ in range(900):
        drift.add(answer(0.5))
    assert drift.out_of_calibration == 0.001
    drift.add(answer(0.5))
    assert drift.out_of_calibration == 0
