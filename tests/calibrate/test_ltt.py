"""The promise of a threshold: p-values against their definition, and the promised rate over many splits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.calibrate.ltt import p_value, passing, units_needed


def direct(mean_loss, units, risk):
    """The definition, with the binomial summed term by term."""
    if mean_loss >= risk:
        return 1.0
    count = math.ceil(round(units * mean_loss, 9))
    tail = sum(math.comb(units, k) * risk**k * (1 - risk) ** (units - k) for k in range(count + 1))
    entropy = (1 - mean_loss) * math.log((1 - mean_loss) / (1 - risk))
    entropy += mean_loss * math.log(mean_loss / risk) if mean_loss else 0.0
    return min(1.0, math.exp(-units * entropy), math.e * tail)


@given(st.floats(0, 1), st.integers(1, 400), st.floats(0.001, 0.999))
def test_p_value_is_its_definition(mean_loss, units, risk):
    result = p_value(mean_loss, units, risk)
    assert result == pytest.approx(direct(mean_loss, units, risk), rel=1e-6, abs=1e-12)
    assert 0 <= result <= 1


def test_at_half_the_risk_more_units_are_needed_and_tests_stop_at_the_first_failure():
    half = units_needed(0.01, 0.95, 0.5)
    assert 1500 < half < 2200
    assert p_value(0.005, half, 0.01) <= 0.05 < p_value(0.005, half - 1, 0.01)
    good, bad = np.zeros((400, 1)), np.ones((400, 1))
    assert passing(np.hstack([good, good, good]), 0.01, 0.95) == 3
    # A later setting may look good again: the order was fixed, so it has no say.
    assert passing(np.hstack([good, bad, good]), 0.01, 0.95) == 1
    assert passing(np.hstack([bad, good]), 0.01, 0.95) == 0


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_the_promise_holds_over_many_splits(confidence):
    """Thresholds of rising true risk; how often the chosen one breaks the promise, over 1,500 samples."""
    rng = np.random.default_rng(0)
    risk, units, samples = 0.05, 300, 1500
    # Loss of a unit: a share of its tokens, so neither binary nor small alone; the true risks straddle the allowed one.
    true = np.array([0.01, 0.02, 0.03, 0.04, 0.048, 0.052, 0.06, 0.08])
    broken = chose = 0
    for _ in range(samples):
        trouble = rng.random((units, 1))
        size = rng.choice([0.2, 0.5, 1.0], (units, 1))
        losses = np.where(trouble < true / np.mean([0.2, 0.5, 1.0]), size, 0.0)
        kept = passing(losses, risk, confidence)
        chose += kept > 0
        broken += kept > 0 and true[kept - 1] > risk
    assert broken / samples <= 1 - confidence
    assert chose > 0.5 * samples, "a rule that never chooses keeps every promise"


@pytest.mark.parametrize("risk, confidence", [(0.5, 0.5), (0.1, 0.9), (0.3, 0.99), (0.9, 0.05), (0.01, 0.95)])
def test_without_an_error_units_are_needed_until_luck_is_too_small(risk, confidence):
    needed = next(n for n in range(1, 10_000) if (1 - risk) ** n <= (1 - confidence) * (1 + 1e-12))
    assert units_needed(risk, confidence) == needed
    assert passing(np.zeros((needed, 3)), risk, confidence) == 3
    assert needed == 1 or passing(np.zeros((needed - 1, 3)), risk, confidence) == 0


def test_the_limits_of_losses_and_units_are_allowed_and_no_more():
    assert p_value(1.0, 1, 0.5) == 1.0 and p_value(0.0, 1, 0.25) == pytest.approx(0.75)
    assert p_value(0.5, 10, 0.5) == 1.0, "a loss as great as the risk shows nothing"
    assert units_needed(0.5, 0.5, 0.0) == 1
    for call, named in (
        (lambda: p_value(1.5, 10, 0.1), r"mean loss 1\.5"),
        (lambda: p_value(-0.01, 1, 0.5), "mean loss"),
        (lambda: p_value(0.5, 0, 0.1), "0 units"),
        (lambda: p_value(0.5, 10, 1.0), r"risk 1\.0"),
        (lambda: p_value(0.0, 1, 0.0), "risk"),
        (lambda: passing([[0.0]], 0.1, 0), "confidence 0"),
        (lambda: passing([[0.0]], 0.5, 1.0), "confidence"),
        (lambda: units_needed(0.5, 0.0), "confidence"),
        (lambda: units_needed(0.1, 0.9, 1), "share 1"),
        (lambda: units_needed(0.5, 0.5, -0.01), "share"),
    ):
        with pytest.raises(ValueError, match=named):
            call()
