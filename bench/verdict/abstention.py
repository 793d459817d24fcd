"""How well a score tells wrong answers from right ones, for keeping back what is likely to be wrong.

With n answers sorted by falling trust and w_k the number of wrong ones among the k most trusted:

    AUROC   chance that a wrong answer is trusted less than a right one, ties counted as one half
    AURC    mean over k of w_k / k: the error rate among the kept, averaged over coverages (Geifman and El-Yaniv, 2017)
    AUGRC   mean over k of w_k / n: the chance of a wrong answer that is kept (Traub et al., arXiv 2407.01032)

Where scores are tied, w_k grows evenly within the tie: what random order gives on average.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from sigma0.calibrate.bootstrap import Estimate, bootstrap

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Abstention:
    """Figures of one score, intervals over answers; no AUROC where all are right or all wrong."""

    auroc: Estimate | None
    aurc: Estimate
    augrc: Estimate


def wrong_among_kept(doubt: Array, wrong: Array) -> Array:
    """w_1 ... w_n for scores of doubt (high: keep back) and errors (0 or 1), both `[n]`."""
    _, group, size = np.unique(doubt, return_inverse=True, return_counts=True)
    per_group = np.bincount(group, weights=wrong, minlength=len(size))
    ends = np.concatenate([[0], np.cumsum(size)])
    totals = np.concatenate([[0.0], np.cumsum(per_group)])
    kept: Array = np.interp(np.arange(1, len(doubt) + 1), ends, totals)
    return kept


def aurc(doubt: Array, wrong: Array) -> float:
    """Area under the risk-coverage curve."""
    return float(np.mean(wrong_among_kept(doubt, wrong) / np.arange(1, len(doubt) + 1)))


def augrc(doubt: Array, wrong: Array) -> float:
    """Area under the generalized risk-coverage curve."""
    return float(np.mean(wrong_among_kept(doubt, wrong)) / len(doubt))


def auroc(doubt: Array, wrong: Array) -> float | None:
    """Area under the receiver operating characteristic, None where all answers are right or all are wrong."""
    bad = wrong.sum()
    if not 0 < bad < len(wrong):
        return None
    # Mann and Whitney's U, a tenth of the time that sklearn's curve takes
    above = rankdata(doubt)[wrong == 1].sum() - bad * (bad + 1) / 2
    return float(above / (bad * (len(wrong) - bad)))


def measure_abstention(doubt: Array, wrong: Array, resamples: int = 1000) -> Abstention:
    """Measure a score of doubt."""
    if len(doubt) != len(wrong) or len(doubt) == 0:
        raise ValueError(f"{len(doubt)} scores for {len(wrong)} answers")
    areas = bootstrap(lambda drawn: aurc(doubt[drawn], wrong[drawn]), len(doubt), resamples)
    general = bootstrap(lambda drawn: augrc(doubt[drawn], wrong[drawn]), len(doubt), resamples)
    assert areas is not None and general is not None
    return Abstention(bootstrap(lambda drawn: auroc(doubt[drawn], wrong[drawn]), len(doubt), resamples), areas, general)
