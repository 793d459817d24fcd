"""Drift: whether the latest answers still look like those that their confidence was calibrated on.

Two figures. The share that was out of calibration counts the answers that are unlike it one by one. The population
stability index (PSI) says how far the confidences have moved as a whole: with e_k the share of the calibration in bin k
between its deciles, and q_k that of the latest answers,

    PSI = sum_k (q_k - e_k) log(q_k / e_k)

the sum of the Kullback-Leibler divergences both ways (arXiv:2303.01227). By the usual rule of thumb 0.1 is a moderate
change and 0.25 a significant one (Yurdakul and Naranjo 2020, "Statistical properties of the population stability
index", Journal of Risk Model Validation). By chance alone n answers in ten bins have about 9 / n, and are under 17 / n
in 19 of 20 cases. No bin is empty, since one more answer is spread over all of them as the calibration was.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from math import log

from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.verdict import ReasonVerdict

WINDOW = 1000
# Of fewer answers chance alone often makes a PSI above 0.1.
FEWEST = 100


class DriftMonitor:
    """Watches the verdicts on the latest answers of a model.

    Args:
        model: Its confidence.
        window: How many answers are remembered.
        fewest: Answers with a confidence from which on there is a PSI.
    """

    def __init__(self, model: ConfidenceModel, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self._edges = model.deciles
        self._expected = [0.1] * (len(self._edges) + 1)
        self._window, self._fewest = window, fewest
        self._latest: deque[tuple[range, bool]] = deque()
        self._counts = [0.0] * len(self._expected)
        self._strange = self._known = 0

    def add(self, verdict: ReasonVerdict) -> None:
        """Takes in a finished answer; the oldest one is forgotten where there are too many."""
        confidence = verdict.confidence
        # one that equals deciles lies in all bins that they bound, as those of the calibration did that made them
        first, last = (
            (0, -1)
            if confidence is None
            else (bisect_left(self._edges, confidence), bisect_right(self._edges, confidence))
        )
        self._latest.append((range(first, last + 1), verdict.reason == "out_of_calibration"))
        self._count(*self._latest[-1], 1)
        if len(self._latest) > self._window:
            self._count(*self._latest.popleft(), -1)

    def _count(self, places: range, is_strange: bool, step: int) -> None:
        self._strange += step * is_strange
        self._known += step * bool(places)
        for place in places:
            self._counts[place] += step / len(places)

    @property
    def out_of_calibration(self) -> float | None:
        """Share of the answers that were; None without any."""
        return self._strange / len(self._latest) if self._latest else None

    @property
    def psi(self) -> float | None:
        """Of their confidences; None where too few have one."""
        total = self._known
        if total < self._fewest:
            return None
        shares = [
            (count + expected) / (total + 1) for count, expected in zip(self._counts, self._expected, strict=True)
        ]
        return sum(
            (share - expected) * log(share / expected) for share, expected in zip(shares, self._expected, strict=True)
        )
