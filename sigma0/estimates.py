"""A figure and its 95 % bootstrap interval."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Estimate:
    """A figure measured on a sample, and the interval that holds 95 % of its bootstrap values."""

    value: float
    interval: tuple[float, float]


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float | None], count: int, resamples: int = 1000
) -> Estimate | None:
    """Estimate a statistic of `count` units by drawing them anew with replacement (percentile bootstrap).

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
    low, high = np.percentile([each for each in drawn if each is not None], [2.5, 97.5])
    return Estimate(float(value), (float(low), float(high)))


def ratio(numerators: ArrayLike, denominators: ArrayLike, resamples: int = 1000) -> Estimate | None:
    """Estimate a ratio of sums over units, drawn anew with replacement.

    Args:
        numerators: One figure for each unit, `[n]`.
        denominators: Another, at least 0, `[n]`.
        resamples: Draws; those whose denominators sum to 0 are left out.

    Returns:
        The estimate, None where all denominators are 0.

    Raises:
        ValueError: If there is no unit.
    """
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if len(below) == 0:
        raise ValueError("0 units to draw from")
    if below.sum() == 0:
        return None
    counts = np.random.default_rng(0).multinomial(len(below), np.full(len(below), 1 / len(below)), resamples)
    sums = counts @ below  # [resamples]
    drawn = (counts @ above)[sums > 0] / sums[sums > 0]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(float(above.sum() / below.sum()), (float(low), float(high)))
