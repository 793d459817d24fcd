"""What each feature of an answer's evidence is worth to the confidence, on answers that it was not fitted on."""

from dataclasses import dataclass

import numpy as np

from sigma0.bench.verdict.abstention import auroc
from sigma0.bench.verdict.asking import Answers
from sigma0.calibrate.bootstrap import Estimate
from sigma0.signals.confidence import ConfidenceModel, transformed
from sigma0.signals.evidence import FEATURES

_SHUFFLES = 20


@dataclass(frozen=True)
class FeatureUse:
    """One feature.

    Attributes:
        name: Its name.
        auroc: Of the feature alone; None where all answers are right or wrong, or where it is not known of all.
        stored: Whether the confidence reads it.
        drop: AUROC that the confidence loses where the feature is shuffled among the answers: mean of 20 shuffles, and
            the middle 95 % of them. None of one that is not read, or where there is no AUROC.
    """

    name: str
    auroc: float | None
    stored: bool
    drop: Estimate | None


def feature_uses(answers: Answers, model: ConfidenceModel | None) -> tuple[FeatureUse, ...]:
    """Every feature, in the order of `FEATURES`.

    Args:
        answers: With their evidence.
        model: The confidence; None reads nothing.
    """
    wrong = (~answers.right).astype(np.float64)
    found = []
    for column, name in enumerate(FEATURES):
        values = answers.evidence[:, column]
        area = auroc(values, wrong) if np.isfinite(values).all() else None
        read = model is not None and name in model.features
        drop = _drop(answers, model, name) if model is not None and read and area is not None else None
        found.append(FeatureUse(name, area, read, drop))
    return tuple(found)


def _drop(answers: Answers, model: ConfidenceModel, name: str) -> Estimate:
    """Permutation importance (Breiman, 2001)."""
    wrong, weights = (~answers.right).astype(np.float64), np.array(model.weights)
    logs = transformed(answers.evidence[:, [FEATURES.index(each) for each in model.features]])
    # ranked as the confidence ranks: the logistic function and the bias change no rank
    whole, place, rng = auroc(logs @ weights, wrong), model.features.index(name), np.random.default_rng(0)
    drops = []
    for _ in range(_SHUFFLES):
        shuffled = logs.copy()
        shuffled[:, place] = rng.permutation(logs[:, place])
        rest = auroc(shuffled @ weights, wrong)
        assert whole is not None and rest is not None
        drops.append(whole - rest)
    low, high = np.percentile(drops, [2.5, 97.5])
    return Estimate(float(np.mean(drops)), (float(low), float(high)))
