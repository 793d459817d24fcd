"""Intervals against published figures, normal theory, and worlds whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.calibrate.bootstrap import bootstrap, clustered_share, ratio, saved_share, share


def test_shares_have_the_published_exact_intervals_and_60_of_60_prompts_may_be_94():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 5
    for part, whole, low, high in ((81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0, 0.1684),
                                   (1, 29, 0.0009, 0.1776)):  # fmt: skip
        assert share(part, whole).interval == pytest.approx((low, high), abs=5e-5)
    assert share(10, 10).interval == (pytest.approx(0.025 ** (1 / 10)), 1.0)
    for part, whole in ((3, 2), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"{part} of {whole} is no share"):
            share(part, whole)
    # however many tokens they have: those of one prompt may all go together
    for tokens in (1, 30):
        result = clustered_share(np.full(60, tokens), np.full(60, tokens))
        assert result.value == 1.0
        assert result.interval == (pytest.approx(0.9404, abs=5e-5), 1.0)
    nothing = clustered_share(np.zeros(60), np.full(60, 30))
    assert nothing.interval == (0.0, pytest.approx(0.0596, abs=5e-5))


def _worlds():
    """Clusters of tokens whose share is known: alone, together by a beta law, and rare prompts that go wrong."""
    rng = np.random.default_rng(5)

    def beta(value, together):
        rest = (1 - together) / together
        return value, lambda sizes: rng.binomial(sizes, rng.beta(value * rest, (1 - value) * rest, len(sizes)))

    def bad(often, kept):
        wrong = 1 - often * (1 - kept)
        return wrong, lambda sizes: np.where(rng.random(len(sizes)) < often, rng.binomial(sizes, kept), sizes)

    worlds = {f"alone {value}": (value, lambda sizes, p=value: rng.binomial(sizes, p)) for value in (0.99, 0.998)}
    worlds |= {f"together {item}": beta(*item) for item in ((0.99, 0.05), (0.99, 0.3), (0.998, 0.5))}
    worlds |= {f"bad prompts {item}": bad(*item) for item in ((0.02, 0.5), (0.05, 0.5), (0.03, 0.1), (0.01, 0.9))}
    return rng, worlds


@pytest.mark.parametrize("prompts", [60, 200])
@pytest.mark.parametrize("estimate", [clustered_share, lambda part, whole: saved_share(whole - part, whole)])
def test_intervals_near_1_hold_the_truth_as_often_as_they_say(prompts, estimate):
    rng, worlds = _worlds()
    for name, (truth, draw) in worlds.items():
        held = []
        for _ in range(400):
            sizes = rng.integers(4, 14, prompts)
            low, high = estimate(draw(sizes), sizes).interval
            held.append(low <= truth <= high)
        assert np.mean(held) >= 0.94, name


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_a_share_stays_between_0_and_1(pairs):
    above = [min(pair) for pair in pairs]
    below = [max(pair) for pair in pairs]
    result = clustered_share(above, below)
    if sum(below) == 0:
        assert result is None
    else:
        assert result.value == sum(above) / sum(below)
        assert 0 <= result.interval[0] <= result.value <= result.interval[1] <= 1
        assert result.interval[0] < result.interval[1], "no interval is without width"


def korn_and_graubard(parts, wholes, items):
    """The docstring's steps with scipy's distributions, for a share between 0 and 1 whose clusters differ."""
    from scipy.stats import beta, t

    n, total, value = len(wholes), items.sum(), parts.sum() / wholes.sum()
    squares = (parts - value * wholes) ** 2
    variance = n / (n - 1) * squares.sum() / wholes.sum() ** 2
    raw = min(value * (1 - value) / variance, total)
    freedom = min(n - 1, squares.sum() ** 2 / (squares**2).sum())
    adjusted = raw * (t.ppf(0.975, max(total - 1, 1)) / t.ppf(0.975, freedom)) ** 2
    effective = min(max(adjusted, min(raw, n)), total)
    have = value * effective
    return value, (beta.ppf(0.025, have, effective - have + 1), beta.ppf(0.975, have + 1, effective - have))


@pytest.mark.parametrize(
    "parts, wholes, items",
    [
        ([1, 2] * 15, [3] * 30, None),  # as many as there are, less the freedom
        ([1, 2, 1, 2, 2, 1], [3] * 6, None),
        ([0, 3] * 6, [3] * 12, None),  # one for each cluster
        ([5, 1, 2, 0, 7], [9, 4, 2, 1, 8], None),
        ([0.5, 0.25, 1.0, 0.75], [1.0] * 4, [3, 5, 2, 8]),
        ([0.5, 0.0], [1.0] * 2, [1, 1]),
    ],
)
def test_an_effective_number_of_items_is_that_of_the_definition(parts, wholes, items):
    counts = np.array(wholes if items is None else items, dtype=float)
    value, interval = korn_and_graubard(np.array(parts, dtype=float), np.array(wholes, dtype=float), counts)
    result = clustered_share(parts, wholes, items)
    assert result.value == pytest.approx(value, rel=1e-12) and result.interval == pytest.approx(interval, rel=1e-9)
    # a cluster without items is none
    more = clustered_share([*parts, 0], [*wholes, 0], None if items is None else [*items, 5])
    assert more == result


def test_single_items_are_independent_and_savings_are_shares_unless_they_are_not():
    assert clustered_share([1, 0, 1, 1], [1] * 4) == share(3, 4)
    assert clustered_share([1, 0, 1, 1], [1] * 4, [2] * 4) != share(3, 4)
    assert clustered_share([0], [0]) is None and clustered_share([0, 1], [0, 1]) == share(1, 1)
    assert saved_share([3, 5], [10, 10]) == clustered_share([7, 5], [10, 10])
    assert saved_share([3, 11], [10, 10]) == ratio([7, -1], [10, 10])
    assert saved_share([5, 10], [10, 20]) == ratio([5, 10], [10, 20]), "all saved the same"
    assert saved_share([0, 0], [10, 20]) == clustered_share([10, 20], [10, 20])
    assert saved_share([10, 20], [10, 20]) == clustered_share([0, 0], [10, 20])
    assert saved_share([0, 0], [0, 0]) is None
    result = saved_share([9, 8, 11], [10, 10, 10])
    assert result.value == pytest.approx(0.0667, abs=1e-4) and result.interval[0] < 0
    assert saved_share([3, 6], [6, 12]).interval == (0.5, 0.5), "what a fixed depth saves is known"
    assert saved_share([6] * 60, [6] * 60).interval == (0.0, pytest.approx(0.0596, abs=5e-5))
    assert ratio([0.001, 0.0, 0.02], [1, 1, 1]).interval[0] == 0.0, "sums of what is never below 0"


@pytest.mark.parametrize("above, below", [([1, 3], [2, 2]), ([5, -1, 2], [1, 2, 3]), ([9, 8, 7, 9], [3, 2, 3, 4])])
def test_a_ratio_has_the_reach_of_its_linearised_variance(above, below):
    from scipy.stats import t

    n, value = len(below), sum(above) / sum(below)
    left = [(y - value * x) ** 2 for y, x in zip(above, below, strict=True)]
    reach = t.ppf(0.975, n - 1) * (n / (n - 1) * sum(left)) ** 0.5 / sum(below)
    low = value - reach if min(above) < 0 else max(value - reach, 0.0)
    result = ratio([*above, 4], [*below, 0])
    assert result.value == pytest.approx(value) and result.interval == pytest.approx((low, value + reach), rel=1e-9)


def test_a_bootstrap_takes_the_middle_of_its_draws():
    values = np.random.default_rng(3).random(20)
    rng = np.random.default_rng(0)
    draws = [float(np.median(values[rng.integers(0, 20, 20)])) for _ in range(1000)]
    result = bootstrap(lambda drawn: float(np.median(values[drawn])), 20)
    assert result.value == np.median(values)
    assert result.interval == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])), rel=1e-12)
    seldom = bootstrap(lambda drawn: float(drawn[0]) if drawn[0] < 5 else None, 10, resamples=200)
    assert seldom.value == 0.0 and 0 <= seldom.interval[0] <= seldom.interval[1] <= 4
    assert bootstrap(lambda drawn: 1.0, 1).interval == (1.0, 1.0)


def test_no_units_and_parts_outside_their_wholes_are_refused():
    for estimate in (ratio, clustered_share, saved_share):
        with pytest.raises(ValueError, match="0 units"):
            estimate([], [])
    with pytest.raises(ValueError, match="0 units"):
        bootstrap(lambda drawn: 0.0, 0)
    for parts in ([1, -1], [1, 4]):
        with pytest.raises(ValueError, match="a part below 0 or above its whole"):
            clustered_share(parts, [3, 3])
    assert bootstrap(lambda drawn: None, 3) is None and ratio([3, 1], [0, 0]) is None
    assert ratio([3], [2]).interval == (1.5, 1.5) and ratio([3, 1], [2, 0]).interval == (1.5, 1.5)
