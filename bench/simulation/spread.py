"""What independent runs say together: a mean and how far it may be off."""

from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean by Student's t, for values of independent runs; None of a single one."""
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return None
    middle = mean(values)
    variance = sum((each - middle) ** 2 for each in values) / (count - 1)
    half = float(t.ppf(0.975, count - 1)) * (variance / count) ** 0.5
    return middle - half, middle + half
