"""Fits the confidence of a model (`sigma0.signals.confidence`) on answers that are known to be right or wrong.

A logistic regression over the logarithms of features of doubt, all weights at least 0. Features are chosen forward: the
first is the one with the least log loss by itself, and each further one has to lower the cross-fitted log loss by more
than twice the standard error of that gain over the answers. What adds nothing is left out, with its figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.model_selection import KFold

from sigma0.signals.confidence import ConfidenceModel, new_share, pair_codes, transformed
from sigma0.signals.evidence import FEATURES, Floats

Bools = npt.NDArray[np.bool_]

FOLDS = 5
_SEED = 0
# Confidences are kept off 0 and 1, so that one wrong answer costs a finite loss.
_CLIP = 1e-6
# Differences that are rounding.
_DUST = 1e-6
# Prompts of the calibration that may have more new pairs than `most_new`, and the greatest such share that still tells
# a strange prompt from an ordinary one.
_NEW_TAIL = 0.002
_TELLING = 0.25
# More pairs than this are no vocabulary of a narrow world, and would swell the file.
MOST_PAIRS = 50_000
_MOST_FEATURES = 4


@dataclass(frozen=True)
class FeatureFigure:
    """What one feature is worth, by cross-fitting."""

    name: str  # Its name
    auroc: float | None  # Of the feature alone; None where all answers are right or all wrong, or where it is not known
    # How much the log loss falls, per answer, if it is added to those chosen (of a chosen one: if it was, to
    # those before it); None where it is not known of every answer, never differs, or equals one before it
    gain: float | None
    error: float | None  # Standard error of that
    chosen: bool  # Whether the model reads it


@dataclass(frozen=True)
class FittedConfidence:
    """A model, and how it came about."""

    model: ConfidenceModel  # The model
    figures: tuple[FeatureFigure, ...]  # Of every feature
    cross_fitted: Floats  # Confidence of each answer under a fit that has not seen it, `[n]`


def fit_confidence(evidence: Floats, right: Bools, prompts: Sequence[Sequence[int]]) -> FittedConfidence | None:
    """Fits a confidence; None where no feature tells right from wrong.

    Args:
        evidence: Features of each answer, `[n, F]`; NaN where one is not known.
        right: Whether each is right, `[n]`.
        prompts: Ids of each prompt.

    Raises:
        ValueError: Where fewer than `FOLDS` answers are right, or wrong, or none is known of all.
    """
    if min(right.sum(), (~right).sum()) < FOLDS:
        raise ValueError(
            f"{int(right.sum())} of {len(right)} answers are right: a confidence needs at least {FOLDS} right and "
            f"{FOLDS} wrong ones"
        )
    known = [column for column in range(len(FEATURES)) if np.isfinite(evidence[:, column]).all()]
    # of short answers the worst tenth is one token, and so the greatest: of equals the first is enough
    firsts = {evidence[:, column].tobytes(): column for column in reversed(known)}
    logs = transformed(evidence)
    varying = sorted(column for column in firsts.values() if np.ptp(logs[:, column]) > _DUST)
    chosen, figures = _choose(logs, right, varying)
    weights, bias = _fit(logs[:, chosen], right)
    if not (weights > 0).any():
        return None
    crossed = cross_fitted(logs[:, chosen], right)
    # what drift is measured against is the model's own: where answers bunch, those of the folds fall into other tenths
    current = 1 / (1 + np.exp(logs[:, chosen] @ weights - bias))
    kept = [column for column, weight in zip(chosen, weights, strict=True) if weight > 0]
    pairs, most_new = familiar_pairs(prompts)
    model = ConfidenceModel(
        features=tuple(FEATURES[column] for column in kept),
        weights=tuple(float(weight) for weight in weights if weight > 0),
        bias=bias,
        most=tuple(float(evidence[:, column].max()) for column in kept),
        longest=int(evidence[:, FEATURES.index("length")].max()),
        pairs=pairs,
        most_new=most_new,
        deciles=tuple(float(item) for item in np.quantile(current, np.arange(1, 10) / 10)),
        answers=len(right),
        auroc=float(roc_auc_score(right, crossed)),
        brier=float(brier_score_loss(right, crossed)),
        calibration_error=calibration_error(crossed, right),
    )
    names = set(model.features)
    output = tuple(_figure(evidence, right, column, figures.get(column), names) for column in range(len(FEATURES)))
    return FittedConfidence(model, output, crossed)


def _choose(logs: Floats, right: Bools, candidates: list[int]) -> tuple[list[int], dict[int, tuple[float, float]]]:
    """Columns chosen forward, and the gain of each candidate with its standard error."""
    base = np.full(len(right), right.mean())
    losses = log_losses(base, right)
    chosen: list[int] = []
    figures: dict[int, tuple[float, float]] = {}
    while len(chosen) < _MOST_FEATURES:
        best: tuple[float, int, Floats] | None = None
        for column in candidates:
            if column in chosen:
                continue
            new = log_losses(cross_fitted(logs[:, [*chosen, column]], right), right)
            gains = losses - new
            figures[column] = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
            if best is None or figures[column][0] > best[0]:
                best = figures[column][0], column, new
        if best is None or best[0] <= (2 * figures[best[1]][1] if chosen else 0):
            break
        chosen.append(best[1])
        losses = best[2]
    return chosen, figures


def _figure(
    evidence: Floats, right: Bools, column: int, gain: tuple[float, float] | None, chosen: set[str]
) -> FeatureFigure:
    values, name = evidence[:, column], FEATURES[column]
    area = float(roc_auc_score(~right, values)) if np.isfinite(values).all() else None
    mean, error = gain or (None, None)
    return FeatureFigure(name, area, mean, error, name in chosen)


def _fit(logs: Floats, right: Bools) -> tuple[Floats, float]:
    """Weights of doubt, at least 0, `[k]`, and the bias: features whose weight falls below 0 are dropped in turn."""
    weights = np.zeros(logs.shape[1])
    # of what does not differ here the scale is nothing, and its weight would be a second bias
    kept = [column for column in range(logs.shape[1]) if np.ptp(logs[:, column]) > _DUST]
    while kept:
        scale = logs[:, kept].std(0) + 1e-12
        regression = LogisticRegression(solver="newton-cholesky").fit(logs[:, kept] / scale, ~right)
        result = regression.coef_[0]
        if (result >= 0).all():
            weights[kept] = result / scale
            return weights, -float(regression.intercept_[0])
        del kept[int(result.argmin())]
    return weights, float(np.log(right.mean() / (1 - right.mean())))


def cross_fitted(logs: Floats, right: Bools) -> Floats:
    """Confidence of each answer under a fit on the other folds, `[n]`.

    Args:
        logs: Transformed features, `[n, k]`.
        right: `[n]`.
    """
    result = np.empty(len(right))
    for fitting, rest in KFold(FOLDS, shuffle=True, random_state=_SEED).split(logs):
        if right[fitting].all() or not right[fitting].any():
            result[rest] = right[fitting].mean()
            continue
        weights, bias = _fit(logs[fitting], right[fitting])
        result[rest] = 1 / (1 + np.exp(np.clip(logs[rest] @ weights - bias, -700, 700)))
    return result


def log_losses(confidence: Floats, right: Bools) -> Floats:
    """-log of the chance that was given to what came, `[n]`."""
    chance = np.where(right, confidence, 1 - confidence)
    losses: Floats = -np.log(np.clip(chance, _CLIP, None))
    return losses


def calibration_error(confidence: Floats, right: Bools, bins: int = 10) -> float:
    """Mean over equal parts of the answers, by confidence, of |mean confidence - share of right ones|."""
    order = np.argsort(confidence, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [abs(float(confidence[part].mean() - right[part].mean())) * len(part) for part in parts]
    return sum(gaps) / len(confidence)


def familiar_pairs(prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...] | None, float]:
    """Pairs of neighbouring ids in prompts, and the share of new ones that all but few of the prompts stay under.

    The share is measured on each fold against the pairs of the others. Where prompts differ so much that it would tell
    nothing, or pairs are many, there are none.
    """
    codes = [frozenset(pair_codes(ids)) for ids in prompts]
    pairs: frozenset[int] = frozenset().union(*codes)
    if len(pairs) > MOST_PAIRS or len(prompts) < FOLDS:
        return None, 0.0
    shares = np.empty(len(prompts))
    for fitting, rest in KFold(FOLDS, shuffle=True, random_state=_SEED).split(shares):
        known: frozenset[int] = frozenset().union(*(codes[place] for place in fitting))
        shares[rest] = [new_share(prompts[place], known) for place in rest]
    most = float(np.quantile(shares, 1 - _NEW_TAIL, method="higher"))
    return (None, 0.0) if most > _TELLING else (tuple(sorted(pairs)), most)
