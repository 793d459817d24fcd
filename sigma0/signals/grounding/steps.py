"""Whether a number comes of others by one step of arithmetic."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sigma0.signals.grounding.quantities import Number

Floats = NDArray[np.float64]
Places = NDArray[np.intp]


class Steps:
    """What comes of numbers by one step.

    The steps are a sum, difference, product or quotient of two numbers, and the sum of what counts the same in a group.

    Args:
        numbers: All of them.
        groups: Places of those that stand together, for sums of more than two.
    """

    def __init__(self, numbers: Sequence[Number], groups: Sequence[Places]) -> None:
        self._groups = [np.arange(len(numbers)), *groups]
        self._nouns = [frozenset(number.nouns) for number in numbers]
        self._amounts = np.array([number.amount for number in numbers], dtype=np.float64)
        self._values = np.array([number.value for number in numbers], dtype=np.float64)
        self._units = np.array([number.unit for number in numbers], dtype=np.str_)
        self._bare = np.array([number.is_bare for number in numbers], dtype=np.bool_)

    def lead_to(self, claimed: Number, tolerance: float, first: Places | None = None) -> bool:
        """Whether a number is the result of a step, within its rounding.

        Args:
            claimed: What was claimed.
            tolerance: Relative difference allowed if it was stated as approximate.
            first: Places of numbers of which a step begins with one, or sums up all numbers; None: with any.
        """
        if not math.isfinite(claimed.value):
            return False
        known, wanted, step = self._amounts, claimed.amount, claimed.step
        if claimed.unit:
            known, wanted, step = self._values, claimed.value, claimed.step * claimed.factor
        slack = max(step / 2, tolerance * abs(wanted) if claimed.about else 0.0, 1e-9 * abs(wanted)) * (1 + 1e-9)
        terms, fits = self._terms(claimed)
        nouns = frozenset(claimed.nouns)
        same = np.array([not nouns.isdisjoint(item) for item in self._nouns], dtype=np.bool_) & fits
        for group in self._groups if first is None else self._groups[:1]:
            for added in (terms[group][fits[group]], terms[group][same[group]]):
                if len(added) > 1 and abs(added.sum() - wanted) <= slack:
                    return True
        # rounded, a number would follow from itself and any small one
        far = abs(known - wanted) > (slack if claimed.about or claimed.step else -1)
        begins = np.ones(len(known), dtype=np.bool_)
        if first is not None:
            begins[:] = False
            begins[first] = True
        adds, addends = (np.sort(terms[far & fits & places]) for places in (begins, True))
        if any(_meet(addends, adds, partners, slack) for partners in (wanted - adds, adds + wanted, adds - wanted)):
            return True
        factors = np.where(self._units == "%", 0.01 * known, known)
        if claimed.unit == "%":
            wanted, slack = 0.01 * wanted, 0.01 * slack
        scales, others = (np.sort(factors[far & (factors != 0) & places]) for places in (begins, True))
        with np.errstate(over="ignore"):
            return (
                _meet(others, scales, wanted / scales, slack / np.abs(scales))
                or _meet(others, scales, wanted * scales, slack * np.abs(scales))
                or (wanted != 0 and _meet(others, scales, scales / wanted, slack * np.abs(scales) / wanted**2))
            )

    def _terms(self, claimed: Number) -> tuple[Floats, NDArray[np.bool_]]:
        """The numbers in the base of a claimed one, and which can be added to it: of its unit, or of none."""
        if not claimed.unit:
            return self._amounts, (self._units == "") | claimed.is_bare
        in_base = np.where(self._bare, self._amounts * claimed.factor, self._values)
        return in_base, (self._units == claimed.unit) | self._bare


def _meet(values: Floats, firsts: Floats, partners: Floats, slack: float | Floats) -> bool:
    """Whether the partner that one of the first numbers lacks is among the sorted values, itself left out."""
    result = np.searchsorted(values, partners + slack, "right") - np.searchsorted(values, partners - slack, "left")
    return bool((result > (np.abs(firsts - partners) <= slack)).any())
