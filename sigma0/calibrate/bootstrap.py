"""A figure and its 95 % interval, by the kind of figure: a share, a ratio of sums, any other statistic.

A percentile bootstrap of a share near 0 or 1 has no width or too little (what never varied in the sample cannot vary
in a resample), so shares get exact intervals: Clopper and Pearson (1934) where items are independent, Korn and Graubard
(1998, Survey Methodology 24) where they come in clusters, as tokens do in prompts.

scipy comes with the extra `calibrate` and is imported where an interval is computed: this file loads without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True)
class Estimate:
    """A figure measured on a sample, and its 95 % interval."""

    value: float
    interval: tuple[float, float]


def share(part: float, whole: float) -> Estimate:
    """Estimate the share of independent items (Clopper and Pearson).

    Args:
        part: Items that have it.
        whole: All items; both may be broken numbers, as effective sizes are.

    Raises:
        ValueError: Unless 0 <= part <= whole and whole > 0.
    """
    from scipy.special import betaincinv

    if not 0 <= part <= whole or whole <= 0:
        raise ValueError(f"{part!r} of {whole!r} is no share: 0 <= part <= whole and whole > 0 are needed")
    low = 0.0 if part == 0 else float(betaincinv(part, whole - part + 1, _TAIL))
    high = 1.0 if part == whole else float(betaincinv(part + 1, whole - part, 1 - _TAIL))
    return Estimate(part / whole, (low, high))


def clustered_share(parts: ArrayLike, wholes: ArrayLike, items: ArrayLike | None = None) -> Estimate | None:
    """Estimate a share of items that come in clusters, such as tokens in prompts (Korn and Graubard).

    Clopper and Pearson with an effective number of items: p (1 - p) over the variance between clusters, never more
    than there are items. It is made smaller, down to one for each cluster, for the degrees of freedom of that variance,
    which are few where few clusters differ from the rest (Satterthwaite). Where no cluster differs from the others,
    nothing is known of how items go together, and each cluster counts as one item.

    Args:
        parts: Items of each cluster that have it, `[n]`.
        wholes: Items of each cluster, `[n]`; or its weight, if `items` holds their number.
        items: Items of each cluster where they are not `wholes`, `[n]`.

    Returns:
        The estimate, None where all `wholes` are 0.

    Raises:
        ValueError: If there is no cluster, or a part is below 0 or above its whole.
    """
    from scipy.special import stdtrit

    above, below = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    if len(below) == 0:
        raise ValueError("0 units to estimate a share from")
    if (above < 0).any() or (above > below).any():
        raise ValueError("a cluster has a part below 0 or above its whole: that is no share")
    counts = (below if items is None else np.asarray(items, dtype=np.float64))[below > 0]
    above, below = above[below > 0], below[below > 0]
    clusters = len(below)
    if clusters == 0:
        return None
    value = float(above.sum() / below.sum())
    if np.all(below == 1) and items is None:
        return share(float(above.sum()), clusters)
    squares = _squares(above, below)
    effective = float(clusters)
    if 0 < value < 1 and squares.sum() > 0:
        total = float(counts.sum())
        raw = min(value * (1 - value) / _variance(above, below), total)
        freedom = min(clusters - 1, squares.sum() ** 2 / (squares**2).sum())
        adjusted = raw * (stdtrit(max(total - 1, 1), 1 - _TAIL) / stdtrit(freedom, 1 - _TAIL)) ** 2
        effective = min(max(adjusted, min(raw, clusters)), total)
    return Estimate(value, share(value * effective, effective).interval)


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate | None:
    """Estimate a ratio of sums over units that is no share of items: passes for each token, one time over another.

    Student's t over the linearised ratio, whose degrees of freedom are those of the units.

    Args:
        numerators: One figure for each unit, `[n]`.
        denominators: Another, at least 0, `[n]`.

    Returns:
        The estimate, None where all denominators are 0; of a single unit its interval is its value.

    Raises:
        ValueError: If there is no unit.
    """
    from scipy.special import stdtrit

    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(below) == 0:
        raise ValueError("0 units to estimate a ratio from")
    above, below = above[below > 0], below[below > 0]
    if len(below) == 0:
        return None
    value = float(above.sum() / below.sum())
    if len(below) == 1:
        return Estimate(value, (value, value))
    reach = float(stdtrit(len(below) - 1, 1 - _TAIL)) * float(np.sqrt(_variance(above, below)))
    least = 0.0 if (above >= 0).all() else -np.inf
    return Estimate(value, (max(value - reach, least), value + reach))


def saved_share(spent: ArrayLike, most: ArrayLike) -> Estimate | None:
    """Estimate the share of loops that were not run: 1 - spent / most over units.

    A `clustered_share`, but a `ratio` where a unit spent more than full depth would have, as `verify` may, and where
    all saved the same share above 0, which a rule such as `fixed` does by itself.

    Args:
        spent: Loops of each unit, `[n]`.
        most: Those of full depth, `[n]`.

    Returns:
        The estimate, None where all `most` are 0.

    Raises:
        ValueError: If there is no unit.
    """
    above, below = np.asarray(spent, dtype=np.float64), np.asarray(most, dtype=np.float64)
    same = above.any() and np.all(above * below.sum() == above.sum() * below) and (above < below).any()
    if (above <= below).all() and not same:
        return clustered_share(below - above, below)
    return ratio(below - above, below)


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float | None], count: int, resamples: int = 1000
) -> Estimate | None:
    """Estimate a statistic of `count` units by resampling them with replacement (percentile bootstrap).

    For medians, ranks and areas under curves; shares and ratios of sums have better intervals above.

    Args:
        statistic: Takes the indices of the units drawn `[count]`; None where it is not defined for them.
        count: Units in the sample.
        resamples: Draws; those without a value are left out.

    Returns:
        The estimate, None where the statistic is not defined for the sample itself.

    Raises:
        ValueError: If there is no unit.
    """
    if count < 1:
        raise ValueError(f"{count!r} units to draw from")
    value = statistic(np.arange(count))
    if value is None:
        return None
    rng = np.random.default_rng(0)
    drawn = (statistic(rng.integers(0, count, count)) for _ in range(resamples))
    low, high = np.percentile([value for value in drawn if value is not None], [100 * _TAIL, 100 * (1 - _TAIL)])
    return Estimate(float(value), (float(low), float(high)))


def _variance(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """Variance of a ratio of sums over at least two units, linearised."""
    n = len(below)
    return float(_squares(above, below).sum() / (below.mean() ** 2 * n * (n - 1)))


def _squares(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each unit is from the ratio of all, squared, `[n]`."""
    squares: NDArray[np.float64] = np.square(above - above.sum() / below.sum() * below)
    return squares
