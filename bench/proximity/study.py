"""Readings of texts and loops, the fit of the proximity's parts on one half of them, and its figures on the other."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from sigma0.bench.proximity.sources import LONGEST, Loop, Text
from sigma0.bench.proximity.traits import Floats, certainty, repetition
from sigma0.decode.transfer import Ints
from sigma0.kernels.collapse import WINDOW, CollapseRule, Part

ALARM = 0.5
TEXTS, FITTED_LOOPS = ("prose", "code", "lists"), ("exact", "changed", "drifted")
# What every loop must reach where it is fitted, above what is promised of others: 0.8 and 0.6.
BARS = {"exact": 0.85, "changed": 0.75}
# Later numbers of ids at which a loop is read, beside the first one.
_LATER = (128, 192, LONGEST)


@dataclass(frozen=True)
class Readings:
    """Traits at some places.

    Attributes:
        name: Of the text, or the kind of the loops.
        kind: "prose", "code", "lists", or the kind of the loops.
        fitted: Whether the parts are fitted on them.
        traits: `[N, 5]`.
        periods: Of the loops, 0 elsewhere, `[N]`.
    """

    name: str
    kind: str
    fitted: bool
    traits: Floats
    periods: Ints


@dataclass(frozen=True)
class Figures:
    """Proximity at some places.

    Attributes:
        name: As in `Readings`.
        kind: As in `Readings`.
        fitted: As in `Readings`.
        readings: How many.
        quantiles: The 1st, 10th, 50th, 90th and 99th percentile.
        lowest: The lowest.
        highest: The highest.
        alarms: Share of at least `ALARM`.
    """

    name: str
    kind: str
    fitted: bool
    readings: int
    quantiles: tuple[float, ...]
    lowest: float
    highest: float
    alarms: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def read_texts(
    model: Any, texts: Sequence[Text], windows: int, on_chunk: Callable[[], None] = lambda: None
) -> list[Readings]:
    """The first text of each kind is halved: its first half is fitted on; everything else is only reported.

    Args:
        model: A causal model whose certainty is read; None leaves drop and margin 0.
        texts: The texts.
        windows: Readings of each text at most, one for each two ids at most, spread evenly.
        on_chunk: Told of each chunk that the model has read.
    """
    found: list[Readings] = []
    for text in texts:
        parts = [(text.ids, False)]
        if text.kind not in {each.kind for each in found}:
            middle = len(text.ids) // 2
            parts = [(text.ids[:middle], True), (text.ids[middle:], False)]
        for ids, fitted in parts:
            count = min(windows // len(parts), (len(ids) - WINDOW) // 2)
            places = np.linspace(WINDOW, len(ids), count).astype(np.int64)
            traits = _traits(model, ids, places, on_chunk)
            found.append(Readings(text.name, text.kind, fitted, traits, np.zeros(count, dtype=np.int64)))
    return found


def read_loops(model: Any, loops: Iterable[Loop], on_chunk: Callable[[], None] = lambda: None) -> list[Readings]:
    """Every loop once it must be noticed, and later; the first span of each period is fitted on."""
    rows: dict[tuple[str, bool], list[tuple[Floats, int]]] = {}
    seen: set[tuple[str, int]] = set()
    for loop in loops:
        places = np.array([loop.first, *(place for place in _LATER if place > loop.first)])
        fitted = (loop.kind, loop.period) not in seen
        seen.add((loop.kind, loop.period))
        traits = _traits(model, loop.ids, places, on_chunk)
        rows.setdefault((loop.kind, fitted), []).extend((row, loop.period) for row in traits)
    return [
        Readings(
            f"{kind} loops",
            kind,
            fitted,
            np.stack([traits for traits, _ in found]),
            np.array([period for _, period in found]),
        )
        for (kind, fitted), found in rows.items()
    ]


def _traits(model: Any, ids: Ints, places: Ints, on_chunk: Callable[[], None]) -> Floats:
    sure = np.zeros((len(ids), 2)) if model is None else certainty(model, ids, on_chunk)
    return np.concatenate([repetition(ids, places), sure[places - 1]], axis=1)


def proximities(rule: CollapseRule, traits: Floats) -> Floats:
    """Proximity of each row of traits `[N, 5]`, by the very formula of the canary."""
    found: Floats = rule.proximity(*torch.from_numpy(traits).unbind(-1)).numpy()
    return found


def without_certainty(readings: Readings) -> Readings:
    """The same readings where no logits are known: drop and margin 0."""
    traits = readings.traits.copy()
    traits[:, 3:] = 0.0
    return replace(readings, traits=traits)


def fit(readings: Sequence[Readings]) -> CollapseRule:
    """Parts by maximum likelihood: a text is no collapse, a loop is one.

    A part begins where 99 % of the prose ends. Ends and weights minimise the log loss; prose, code and lists weigh the
    same, and all of them together as much as the loops, each kind of which weighs the same too. What the lowest loop
    misses of `BARS` counts ten times. Babble is left out, since what finds it finds code too. No single part is taken
    for certain.
    """
    from scipy.optimize import differential_evolution

    calm = _fitted(readings, TEXTS)
    looped = _fitted(readings, FITTED_LOOPS)
    lows = np.quantile(calm["prose"], 0.99, axis=0)
    tops = np.maximum(np.concatenate(list(looped.values())).max(axis=0), lows + 0.1)

    def rule(numbers: Floats) -> CollapseRule:
        highs, weights = lows + numbers[:5] * (tops - lows), numbers[5:]
        made = [Part(*(round(float(x), 3) for x in part)) for part in zip(lows, highs, weights, strict=True)]
        periodicity, echo, sameness, drop, margin = made
        return CollapseRule(periodicity, echo, sameness, drop, margin)

    def loss(numbers: Floats) -> float:
        found = rule(numbers)
        false = [-np.log1p(-proximities(found, traits).clip(max=1 - 1e-6)).mean() for traits in calm.values()]
        alarmed = {kind: proximities(found, traits) for kind, traits in looped.items()}
        missed = [-np.log(values.clip(min=1e-6)).mean() for values in alarmed.values()]
        short = sum(max(0.0, bar - float(alarmed[kind].min())) for kind, bar in BARS.items() if kind in alarmed)
        return float(np.mean(false) + np.mean(missed)) + 10 * short

    bounds = [(0.1, 1.0)] * 5 + [(0.0, 0.95)] * 3 + [(0.0, 0.35), (0.0, 0.15)]
    # the loss has steps, from rounding, and several valleys
    best = differential_evolution(loss, bounds, seed=0, popsize=8, maxiter=120, tol=1e-6, polish=False)
    return rule(best.x)


def _fitted(readings: Sequence[Readings], kinds: tuple[str, ...]) -> dict[str, Floats]:
    """Traits to fit on, by kind."""
    found = {kind: [each.traits for each in readings if each.fitted and each.kind == kind] for kind in kinds}
    return {kind: np.concatenate(traits) for kind, traits in found.items() if traits}


def figures(rule: CollapseRule, readings: Sequence[Readings]) -> list[Figures]:
    """Proximity of each group."""
    found = []
    for each in readings:
        values = proximities(rule, each.traits)
        found.append(
            Figures(
                each.name,
                each.kind,
                each.fitted,
                len(values),
                tuple(round(float(x), 4) for x in np.quantile(values, [0.01, 0.1, 0.5, 0.9, 0.99])),
                round(float(values.min()), 4),
                round(float(values.max()), 4),
                round(float((values >= ALARM).mean()), 4),
            )
        )
    return found


def roc(rule: CollapseRule, calm: Floats, alarmed: Floats) -> tuple[float, list[tuple[float, float]]]:
    """Area under the curve, and the curve: share of false alarms and share of loops found at each threshold."""
    from sklearn.metrics import roc_auc_score, roc_curve

    scores = np.concatenate([proximities(rule, calm), proximities(rule, alarmed)])
    truth = np.concatenate([np.zeros(len(calm)), np.ones(len(alarmed))])
    false, true, _ = roc_curve(truth, scores)
    return float(roc_auc_score(truth, scores)), [(float(a), float(b)) for a, b in zip(false, true, strict=True)]
