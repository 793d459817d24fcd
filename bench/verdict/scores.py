"""Scores of doubt beside each other: how well each tells wrong answers from right ones."""

from dataclasses import dataclass

import numpy as np

from sigma0.bench.verdict.abstention import augrc, aurc, auroc, wrong_among_kept
from sigma0.bench.verdict.asking import Answers
from sigma0.calibrate.bootstrap import Estimate, bootstrap
from sigma0.signals.evidence import FEATURES, Floats

RISK = 0.05
CONFIDENCE = "confidence"
PLAIN = "mean entropy"
# Features that are scores by themselves, by the name that tables give them.
FEATURE_SCORES = {
    PLAIN: "mean_entropy",
    "minimum margin": "most_doubt",
    "mean deepest surprise": "mean_deepest_surprise",
    "most deepest surprise": "most_deepest_surprise",
    "mean depth": "mean_depth",
    "unmet tokens": "mean_unmet",
    "length": "length",
}
RANDOM = "random"


@dataclass(frozen=True)
class Separation:
    """How well a score of doubt tells wrong answers from right ones.

    Attributes:
        auroc: Chance that a wrong answer is doubted more; None where all are right or all wrong.
        aurc: Error rate among the kept, averaged over coverages.
        excess_aurc: AURC less that of an oracle.
        augrc: Chance of a wrong answer that is kept, averaged over coverages.
        coverage: Largest share that can be kept with at most 5 % wrong.
    """

    auroc: Estimate | None
    aurc: float
    excess_aurc: float
    augrc: float
    coverage: float


def doubts(answers: Answers) -> dict[str, Floats]:
    """Scores that are high where an answer may be wrong, each `[n]`; those that are not known of all are left out."""
    known = [verdict.confidence for verdict in answers.verdicts]
    told = {CONFIDENCE: np.array([1.0 if each is None else 1 - each for each in known])}
    told |= {name: answers.evidence[:, FEATURES.index(feature)] for name, feature in FEATURE_SCORES.items()}
    told[RANDOM] = np.random.default_rng(0).random(len(known))
    return {name: values for name, values in told.items() if np.isfinite(values).all()}


def separate(doubt: Floats, wrong: Floats) -> Separation:
    """Figures of one score."""
    area = aurc(doubt, wrong)
    risks = wrong_among_kept(doubt, wrong) / np.arange(1, len(wrong) + 1)
    kept = np.flatnonzero(risks <= RISK)
    return Separation(
        auroc=bootstrap(lambda drawn: auroc(doubt[drawn], wrong[drawn]), len(wrong)),
        aurc=area,
        excess_aurc=area - aurc(wrong, wrong),
        augrc=augrc(doubt, wrong),
        coverage=float(kept[-1] + 1) / len(wrong) if len(kept) else 0.0,
    )


def auroc_more(doubt: Floats, other: Floats, wrong: Floats) -> Estimate | None:
    """AUROC of a score less that of another, on the same answers in each resample; None where there is none."""

    def more(drawn: np.ndarray) -> float | None:
        first, second = auroc(doubt[drawn], wrong[drawn]), auroc(other[drawn], wrong[drawn])
        return None if first is None or second is None else first - second

    return bootstrap(more, len(wrong))
