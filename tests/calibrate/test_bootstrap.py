"""Intervals against published figures, normal theory, and worlds whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.calibrate.bootstrap import bootstrap, clustered_share, ratio, saved_share, share


def test_shares_have_the_published_exact_intervals():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 5
    for part, whole, low, high in ((81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0, 0.1684),
                                   (1, 29, 0.0009, 0.1776)):  # fmt: skip
        assert share(part, whole).interval == pytest.approx((low, high), abs=5e-5)
    assert share(10, 10).interval == (pytest.approx(0.025 ** (1 / 10)), 1.0)
    for part, whole in ((3, 2), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"{part} of {whole} is no share"):
            share(part, whole)


@pytest.mark.parametrize("parts", [[1, -1], [1, 4]])
def test_one_part_outside_its_whole_is_enough_to_be_no_share(parts):
    with pytest.raises(ValueError, match="a part below 0 or above its whole"):
        clustered_share(parts, [3, 3])


def test_60_of_60_prompts_may_be_94():
    """However many tokens they have: those of one prompt may all go together."""
    for tokens in (1, 30):
        found = clustered_share(np.full(60, tokens), np.full(60, tokens))
        assert found.value == 1.0
        assert found.interval == (pytest.approx(0.9404, abs=5e-5), 1.0)
    nothing = clustered_share(np.zeros(60), np.full(60, 30))
    assert nothing.interval == (0.0, pytest.approx(0.0596, abs=5e-5))


def test_clusters_of_equal_items_are_worth_one_item_each():
    """Half of the clusters wholly in, half wholly out: as many items as clusters, for the freedom of their variance."""
    alone = share(50, 100).interval
    together = clustered_share([0, 20] * 50, [20] * 100).interval
    assert together == pytest.approx(alone, abs=0.01)
    apart = clustered_share([9, 11] * 50, [20] * 100).interval
    assert apart == pytest.approx(share(1000, 2000).interval, abs=0.001), "never more than there are items"


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
    worlds |= {f"together {each}": beta(*each) for each in ((0.99, 0.05), (0.99, 0.3), (0.998, 0.5))}
    worlds |= {f"bad prompts {each}": bad(*each) for each in ((0.02, 0.5), (0.05, 0.5), (0.03, 0.1), (0.01, 0.9))}
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


def test_a_share_of_answers_near_1_holds_the_truth():
    rng = np.random.default_rng(6)
    for truth in (0.95, 0.98, 0.995, 0.999):
        intervals = [share(int(right), 60).interval for right in rng.binomial(60, truth, 1000)]
        assert np.mean([low <= truth <= high for low, high in intervals]) >= 0.94


def test_the_interval_of_a_mean_is_that_of_normal_theory():
    values = np.random.default_rng(1).normal(3.0, 2.0, 900)
    found = ratio(values, np.ones(900))
    half = 1.96 * values.std() / 30
    assert found.value == pytest.approx(values.mean())
    assert found.interval == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01 * half)


def test_a_ratio_is_that_of_units_drawn_anew():
    """Numerator and denominator of a unit go together, as they do in the slow form."""
    rng = np.random.default_rng(2)
    below = rng.integers(1, 30, 200)
    above = below * rng.random(200)
    fast = ratio(above, below)
    slow = bootstrap(lambda drawn: float(above[drawn].sum() / below[drawn].sum()), 200, resamples=4000)
    assert fast.value == slow.value
    assert fast.interval == pytest.approx(slow.interval, abs=0.005)


def test_a_ratio_holds_the_truth_as_often_as_it_says():
    """Passes for each token of few prompts, whose lengths and depths go together."""
    rng = np.random.default_rng(7)
    held = []
    for _ in range(1000):
        tokens = rng.integers(4, 14, 60)
        low, high = ratio(rng.poisson(tokens * rng.gamma(9, 0.2, 60)), tokens).interval
        held.append(low <= 1.8 <= high)
    assert np.mean(held) >= 0.94


def test_what_costs_more_than_full_depth_saves_less_than_nothing():
    found = saved_share([9, 8, 11], [10, 10, 10])
    assert found.value == pytest.approx(0.0667, abs=1e-4) and found.interval[0] < 0
    assert saved_share([3, 6], [6, 12]).interval == (0.5, 0.5), "what a fixed depth saves is known"
    assert saved_share([6] * 60, [6] * 60).interval == (0.0, pytest.approx(0.0596, abs=5e-5))
    assert ratio([0.001, 0.0, 0.02], [1, 1, 1]).interval[0] == 0.0, "sums of what is never below 0"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_a_share_stays_between_0_and_1(pairs):
    above = [min(pair) for pair in pairs]
    below = [max(pair) for pair in pairs]
    found = clustered_share(above, below)
    if sum(below) == 0:
        assert found is None
    else:
        assert found.value == sum(above) / sum(below)
        assert 0 <= found.interval[0] <= found.value <= found.interval[1] <= 1
        assert found.interval[0] < found.interval[1], "no interval is without width"


def test_no_units_are_refused():
    for estimate in (ratio, clustered_share, saved_share):
        with pytest.raises(ValueError, match="0 units"):
            estimate([], [])
    with pytest.raises(ValueError, match="no share"):
        clustered_share([2], [1])
    with pytest.raises(ValueError, match="0 units"):
        bootstrap(lambda drawn: 0.0, 0)
    assert bootstrap(lambda drawn: None, 3) is None


def test_resamples_are_of_the_units_and_of_all_alike():
    drawn = []
    bootstrap(lambda indices: drawn.append(indices) or 0.0, 5, resamples=400)
    assert drawn[0].tolist() == [0, 1, 2, 3, 4] and len(drawn) == 401
    counts = np.bincount(np.concatenate(drawn[1:]), minlength=5)
    assert len(counts) == 5 and {len(each) for each in drawn} == {5}
    assert np.abs(counts / 2000 - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 2000)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=12), st.booleans())
def test_clustered_shares_are_korn_and_graubards(clusters, weighted):
    """The formulas of the docstring in other words, with scipy's distributions."""
    from scipy.stats import beta, t

    wholes = np.array([whole for _, whole in clusters], dtype=float)
    parts = np.array([min(part, whole) for part, whole in clusters], dtype=float)
    items = 2 * wholes + 1 if weighted else wholes
    share_of_all, n = parts.sum() / wholes.sum(), len(wholes)
    if (wholes == 1).all() and not weighted:
        return
    residuals = (parts - share_of_all * wholes) ** 2
    effective = float(n)
    if 0 < share_of_all < 1 and residuals.any():
        variance = n / (n - 1) * residuals.sum() / wholes.sum() ** 2
        raw = min(share_of_all * (1 - share_of_all) / variance, items.sum())
        freedom = min(n - 1, residuals.sum() ** 2 / (residuals**2).sum())
        factor = t.ppf(0.975, max(items.sum() - 1, 1)) / t.ppf(0.975, freedom)
        effective = min(max(raw * factor**2, min(raw, n)), items.sum())
    have, lack = share_of_all * effective, (1 - share_of_all) * effective
    low = 0.0 if have == 0 else beta.ppf(0.025, have, lack + 1)
    high = 1.0 if share_of_all == 1 else beta.ppf(0.975, have + 1, lack)
    found = clustered_share(parts, wholes, items if weighted else None)
    assert found.value == pytest.approx(share_of_all)
    assert found.interval == pytest.approx((low, high), rel=1e-5, abs=1e-7)


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
    return value, (beta.ppf(0.025, have, effective - have + 1), beta.ppf(0.975, have + 1, effective - have)), effective


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
    value, interval, _ = korn_and_graubard(np.array(parts, dtype=float), np.array(wholes, dtype=float), counts)
    found = clustered_share(parts, wholes, items)
    assert found.value == pytest.approx(value, rel=1e-12) and found.interval == pytest.approx(interval, rel=1e-9)
    # a cluster without items is none
    more = clustered_share([*parts, 0], [*wholes, 0], None if items is None else [*items, 5])
    assert more == found


def test_single_items_are_independent_unless_they_stand_for_several():
    assert clustered_share([1, 0, 1, 1], [1] * 4) == share(3, 4)
    assert clustered_share([1, 0, 1, 1], [1] * 4, [2] * 4) != share(3, 4)
    assert clustered_share([0], [0]) is None and clustered_share([0, 1], [0, 1]) == share(1, 1)
    with pytest.raises(ValueError, match="no share"):
        clustered_share([-1], [1])


@pytest.mark.parametrize("above, below", [([1, 3], [2, 2]), ([5, -1, 2], [1, 2, 3]), ([9, 8, 7, 9], [3, 2, 3, 4])])
def test_a_ratio_has_the_reach_of_its_linearised_variance(above, below):
    from scipy.stats import t

    n, value = len(below), sum(above) / sum(below)
    left = [(y - value * x) ** 2 for y, x in zip(above, below, strict=True)]
    reach = t.ppf(0.975, n - 1) * (n / (n - 1) * sum(left)) ** 0.5 / sum(below)
    low = value - reach if min(above) < 0 else max(value - reach, 0.0)
    found = ratio([*above, 4], [*below, 0])
    assert found.value == pytest.approx(value) and found.interval == pytest.approx((low, value + reach), rel=1e-9)


def test_a_ratio_of_one_unit_or_none():
    assert ratio([3], [2]).interval == (1.5, 1.5) and ratio([3, 1], [2, 0]).interval == (1.5, 1.5)
    assert ratio([3, 1], [0, 0]) is None


def test_savings_are_shares_of_loops_unless_a_rule_or_a_check_makes_them_others():
    assert saved_share([3, 5], [10, 10]) == clustered_share([7, 5], [10, 10])
    assert saved_share([3, 11], [10, 10]) == ratio([7, -1], [10, 10])
    assert saved_share([5, 10], [10, 20]) == ratio([5, 10], [10, 20]), "all saved the same"
    assert saved_share([0, 0], [10, 20]) == clustered_share([10, 20], [10, 20])
    assert saved_share([10, 20], [10, 20]) == clustered_share([0, 0], [10, 20])
    assert saved_share([0, 0], [0, 0]) is None


def test_a_bootstrap_takes_the_middle_of_its_draws():
    values = np.random.default_rng(3).random(20)
    rng = np.random.default_rng(0)
    draws = [float(np.median(values[rng.integers(0, 20, 20)])) for _ in range(1000)]
    found = bootstrap(lambda drawn: float(np.median(values[drawn])), 20)
    assert found.value == np.median(values)
    assert found.interval == pytest.approx(tuple(np.percentile(draws, [2.5, 97.5])), rel=1e-12)
    seldom = bootstrap(lambda drawn: float(drawn[0]) if drawn[0] < 5 else None, 10, resamples=200)
    assert seldom.value == 0.0 and 0 <= seldom.interval[0] <= seldom.interval[1] <= 4
    assert bootstrap(lambda drawn: 1.0, 1).interval == (1.0, 1.0)
