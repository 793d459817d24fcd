"""What a difference between two levels is worth: paired tests, their correction, and what guessing would score."""

from collections.abc import Mapping, Sequence
from math import comb

from sigma0.calibrate.bootstrap import Estimate, share


def majority(labels: Sequence[bool]) -> Estimate:
    """What always saying the commoner label would score, with its exact 95 % interval."""
    return share(max(sum(labels), len(labels) - sum(labels)), len(labels))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """The p-value of McNemar's two-sided test in its exact form (Q. McNemar, 1947), at any number of items.

    Of the items on which the two differ, either is as likely to be right where they are equally good: the p-value is
    twice the lower tail of that binomial distribution, at most 1. Whole numbers are summed, so that nothing is rounded
    before the last division. No item that differs gives 1.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired test needs the same items twice, got {len(first)} and {len(second)}")
    pairs = list(zip(first, second, strict=True))
    only_first = sum(one and not other for one, other in pairs)
    only_second = sum(other and not one for one, other in pairs)
    n, fewer = only_first + only_second, min(only_first, only_second)
    tail = 2 * sum(comb(n, k) for k in range(fewer + 1))
    return float(min(tail, 2**n) / 2**n)


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """P-values corrected for being several (S. Holm, 1979), under the names and in the order that they came.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none gets smaller than one before it, or over 1.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(values, key=lambda item: values[item])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in values}
