"""Thresholds that keep a promise: Learn then Test with fixed-sequence testing (arXiv 2110.01052, sections 2 and 3.3).

Each unit i has a loss L_i(lambda) in [0, 1] at every setting lambda of a grid; the risk is its expectation. For the
null hypothesis "the risk at lambda is above alpha" the Hoeffding-Bentkus p-value (there, proposition 1; arXiv
2101.02703) is

    min( exp(-n h(min(R, alpha), alpha)),  e * P(Binomial(n, alpha) <= ceil(n R)) )

with R the mean loss of n units and h(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)). Settings are tested in an
order fixed beforehand, the safest first, each at level delta, until one is not rejected. With probability at least 1
- delta over the units, no setting that was passed has a risk above alpha.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom


def p_value(mean_loss: float, units: int, risk: float) -> float:
    """Hoeffding-Bentkus p-value of "the risk is above `risk`".

    Args:
        mean_loss: Mean loss of the units, in [0, 1].
        units: How many, at least 1.
        risk: alpha, in (0, 1).

    Raises:
        ValueError: If a value is out of range.
    """
    if not 0 <= mean_loss <= 1:
        raise ValueError(f"mean loss {mean_loss!r} is not in [0, 1]")
    if units < 1:
        raise ValueError(f"{units!r} units: at least 1")
    _check_share("risk", risk)
    if mean_loss >= risk:
        return 1.0
    hoeffding = math.exp(-units * _relative_entropy(mean_loss, risk))
    # Rounded first, so that 3.0000000000000004 errors count as three.
    bentkus = math.e * float(binom.cdf(math.ceil(round(units * mean_loss, 9)), units, risk))
    return min(hoeffding, bentkus, 1.0)


def passing(losses: NDArray[np.float64] | Sequence[Sequence[float]], risk: float, confidence: float) -> int:
    """How many settings, from the first on, keep the risk.

    Args:
        losses: Loss of each unit at each setting, the safest setting first, `[units, settings]`.
        risk: alpha, in (0, 1).
        confidence: 1 - delta, in (0, 1).

    Returns:
        k: settings 0 to k - 1 have a risk of at most `risk`, all of them at once with probability `confidence`.
    """
    _check_share("confidence", confidence)
    table = np.asarray(losses, dtype=np.float64)
    for setting, mean_loss in enumerate(table.mean(0)):
        if p_value(float(mean_loss), len(table), risk) > 1 - confidence:
            return setting
    return len(table[0])


def units_needed(risk: float, confidence: float, share: float = 0.0) -> int:
    """The fewest units that keep the promise if their mean loss is `share` of the allowed risk.

    Args:
        risk: alpha, in (0, 1).
        confidence: 1 - delta, in (0, 1).
        share: Mean loss over alpha, in [0, 1).
    """
    _check_share("confidence", confidence)
    if not 0 <= share < 1:
        raise ValueError(f"share {share!r} is not in [0, 1)")
    low, high = 0, 1
    while p_value(share * risk, high, risk) > 1 - confidence:
        low, high = high, 2 * high
    # The p-value is not quite monotone in n (a count is a whole number); the bisection ends at a change of sides.
    while high - low > 1:
        middle = (low + high) // 2
        if p_value(share * risk, middle, risk) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _relative_entropy(first: float, second: float) -> float:
    rest = (1 - first) * math.log((1 - first) / (1 - second))
    return rest if first == 0 else first * math.log(first / second) + rest


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} {value!r} is not between 0 and 1")
