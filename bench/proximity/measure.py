"""Readings of texts and loops, the fit of the proximity's parts on one half of them, and its figures on the other.

It must be low on texts, and high on loops. The parts, in their order: repetition of ids, and a model's certainty.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sigma0.decode.transfer import Ints
from sigma0.kernels.collapse import ALPHA, FLOOR, WARM_UP, WINDOW, CollapseRule, Part, repetition_of

PERIODS = tuple(range(1, 65))
SHORTEST_CHANGED, LARGEST_BABBLE = 8, 16
LONGEST = 256
# Of a text, so that a model can read it in minutes.
MOST_TOKENS = 60_000
_SEED = 0


@dataclass(frozen=True)
class Text:
    """The first ids of a stored text, `[N]`, with the sha256 of its file; its kind is "prose", "code" or "lists"."""

    kind: str
    name: str
    sha256: str
    ids: Ints


@dataclass(frozen=True)
class Loop:
    """A text that has collapsed."""

    # "exact"; "changed": one id of each period is another one; "drifted": each period has lost an id or gained
    # one; "babble": a few ids in any order
    kind: str
    period: int  # Ids until it comes back; of babble, how many ids there are
    first: int  # Ids once 3 periods and 40 ids are out: where it must be noticed
    ids: Ints  # `[LONGEST]`


def read_text(kind: str, path: Path, tokenizer: Any) -> Text:
    """A text file, a `.jsonl` or `.jsonl.gz` of HumanEval's problems, or a `.json` of StrategyQA's items.

    Raises:
        ValueError: For a file of another kind.
    """
    raw = path.read_bytes()
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
        text = "\n\n".join(item["prompt"] + item["canonical_solution"] for item in map(json.loads, lines))
    elif path.suffix == ".json":
        text = "\n".join(fact for item in json.loads(raw) for fact in item["facts"])
    else:
        text = raw.decode()
    ids = np.array(tokenizer(text, verbose=False)["input_ids"][:MOST_TOKENS], dtype=np.int64)
    return Text(kind, path.name, hashlib.sha256(raw).hexdigest(), ids)


def loops(prose: Ints, seeds: int) -> Iterator[Loop]:
    """Spans of a text over and over, for every period, and with faults in each period from 8 on; and babble.

    Spans, some for each period, and faults are taken from the prose, `[N]`.
    """
    rng = np.random.default_rng(_SEED)
    for period in PERIODS:
        for _ in range(seeds):
            start = int(rng.integers(0, len(prose) - period))
            span = prose[start : start + period]
            first = max(3 * period, 40)
            yield Loop("exact", period, first, np.resize(span, LONGEST))
            if period >= SHORTEST_CHANGED:
                for kind, fault in (("changed", _changed), ("drifted", _drifted)):
                    periods = [fault(span, prose, rng) for _ in range(-(-LONGEST // (period - 1)))]
                    yield Loop(kind, period, first, np.concatenate(periods)[:LONGEST])
            if 2 <= period <= LARGEST_BABBLE:
                yield Loop("babble", period, first, rng.choice(span, LONGEST))


def _changed(span: Ints, prose: Ints, rng: np.random.Generator) -> Ints:
    faulty: Ints = span.copy()
    faulty[rng.integers(len(span))] = rng.choice(prose)
    return faulty


def _drifted(span: Ints, prose: Ints, rng: np.random.Generator) -> Ints:
    place = rng.integers(len(span))
    faulty: Ints = np.delete(span, place) if rng.integers(2) else np.insert(span, place, rng.choice(prose))
    return faulty


def by_kind(texts: Mapping[str, tuple[Path, ...]], tokenizer: Any) -> list[Text]:
    """All files, in their order."""
    return [read_text(kind, path, tokenizer) for kind, paths in texts.items() for path in paths]


Floats = npt.NDArray[np.float64]
# Tokens that a model reads together; the first WINDOW of each are read with little before them.
CHUNK = 1024
ALARM = 0.5
TEXTS, FITTED_LOOPS = ("prose", "code", "lists"), ("exact", "changed", "drifted")
# What every loop must reach where it is fitted, above what is promised of others: 0.8 and 0.6.
BARS = {"exact": 0.85, "changed": 0.75}
# Later numbers of ids at which a loop is read, beside the first one.
_LATER = (128, 192, LONGEST)


def repetition(ids: Ints, places: Ints) -> Floats:
    """periodicity, echo and sameness of a text `[L]` once each number of ids, at least 1, is out: `[N, 3]` of `[N]`."""
    result = []
    for part in np.array_split(places, max(1, len(places) // 256)):
        ring = np.zeros((len(part), WINDOW), dtype=np.int64)
        for row, length in enumerate(part.tolist()):
            numbers = np.arange(max(0, length - WINDOW), length)
            ring[row, numbers % WINDOW] = ids[numbers]
        periodicity, _, echo, distinct = repetition_of(torch.from_numpy(ring), torch.from_numpy(part))
        result.append(torch.stack([periodicity, echo, 1 - distinct], dim=-1).double().numpy())
    return np.concatenate(result)


def certainty(model: Any, ids: Ints) -> Floats:
    """Fall of the entropy and lead of the likeliest id where each id is chosen, `[L, 2]`; 0 for the first id.

    A causal model reads the text `[L]` by teacher forcing.
    """
    entropies, margins = np.zeros(len(ids)), np.zeros(len(ids))
    for start in range(0, len(ids), CHUNK):
        part = torch.from_numpy(ids[start : start + CHUNK + 1])
        with torch.inference_mode():
            logits = model(part[None]).logits[0, :-1].float()
        chances = logits.softmax(-1)
        top = chances.topk(2, dim=-1).values
        where = slice(start + 1, start + len(part))
        entropies[where] = (-(chances * logits.log_softmax(-1)).sum(-1)).numpy()
        margins[where] = (top[:, 0] - top[:, 1]).numpy()
    # negative z of each entropy against the exponential mean and variance of those before it
    mean = variance = 0.0
    drops = np.zeros(len(ids))
    for number, entropy in enumerate(entropies.tolist()):
        if number >= WARM_UP:
            drops[number] = (mean - entropy) / max(variance, FLOOR) ** 0.5
        step = entropy - mean
        mean, variance = (
            (entropy, 0.0) if number == 0 else (mean + ALPHA * step, (1 - ALPHA) * (variance + ALPHA * step * step))
        )
    return np.stack([drops, margins], axis=1)


@dataclass(frozen=True)
class Readings:
    """Traits at some places."""

    name: str  # Of the text, or the kind of the loops
    kind: str  # "prose", "code", "lists", or the kind of the loops
    fitted: bool  # Whether the parts are fitted on them
    traits: Floats  # `[N, 5]`


def read_texts(model: Any, texts: Sequence[Text], windows: int) -> list[Readings]:
    """The first text of each kind is halved: its first half is fitted on; everything else is only reported.

    Without a model, whose certainty is read, drop and margin are 0. Readings of a text are spread evenly: `windows` at
    most, and one for each two ids at most.
    """
    result: list[Readings] = []
    for text in texts:
        parts = [(text.ids, False)]
        if text.kind not in {item.kind for item in result}:
            middle = len(text.ids) // 2
            parts = [(text.ids[:middle], True), (text.ids[middle:], False)]
        for ids, fitted in parts:
            count = min(windows // len(parts), (len(ids) - WINDOW) // 2)
            places = np.linspace(WINDOW, len(ids), count).astype(np.int64)
            result.append(Readings(text.name, text.kind, fitted, _traits(model, ids, places)))
    return result


def read_loops(model: Any, loops: Iterable[Loop]) -> list[Readings]:
    """Every loop once it must be noticed, and later; the first span of each period is fitted on."""
    rows: dict[tuple[str, bool], list[Floats]] = {}
    seen: set[tuple[str, int]] = set()
    for loop in loops:
        places = np.array([loop.first, *(place for place in _LATER if place > loop.first)])
        fitted = (loop.kind, loop.period) not in seen
        seen.add((loop.kind, loop.period))
        rows.setdefault((loop.kind, fitted), []).append(_traits(model, loop.ids, places))
    return [Readings(f"{kind} loops", kind, fitted, np.concatenate(result)) for (kind, fitted), result in rows.items()]


def _traits(model: Any, ids: Ints, places: Ints) -> Floats:
    sure = np.zeros((len(ids), 2)) if model is None else certainty(model, ids)
    return np.concatenate([repetition(ids, places), sure[places - 1]], axis=1)


def proximities(rule: CollapseRule, traits: Floats) -> Floats:
    """Proximity of each row of traits `[N, 5]`, by the very formula of the canary."""
    result: Floats = rule.proximity(*torch.from_numpy(traits).unbind(-1)).numpy()
    return result


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

    fitted = [item for item in readings if item.fitted]
    calm, looped = traits_by_kind(fitted, TEXTS), traits_by_kind(fitted, FITTED_LOOPS)
    lows = np.quantile(calm["prose"], 0.99, axis=0)
    tops = np.maximum(np.concatenate(list(looped.values())).max(axis=0), lows + 0.1)

    def rule(numbers: Floats) -> CollapseRule:
        highs, weights = lows + numbers[:5] * (tops - lows), numbers[5:]
        made = [Part(*(round(float(x), 3) for x in part)) for part in zip(lows, highs, weights, strict=True)]
        periodicity, echo, sameness, drop, margin = made
        return CollapseRule(periodicity, echo, sameness, drop, margin)

    def loss(numbers: Floats) -> float:
        result = rule(numbers)
        false = [-np.log1p(-proximities(result, traits).clip(max=1 - 1e-6)).mean() for traits in calm.values()]
        alarmed = {kind: proximities(result, traits) for kind, traits in looped.items()}
        missed = [-np.log(values.clip(min=1e-6)).mean() for values in alarmed.values()]
        short = sum(max(0.0, bar - float(alarmed[kind].min())) for kind, bar in BARS.items() if kind in alarmed)
        return float(np.mean(false) + np.mean(missed)) + 10 * short

    bounds = [(0.1, 1.0)] * 5 + [(0.0, 0.95)] * 3 + [(0.0, 0.35), (0.0, 0.15)]
    # the loss has steps, from rounding, and several valleys
    best = differential_evolution(loss, bounds, seed=0, popsize=8, maxiter=120, tol=1e-6, polish=False)
    return rule(best.x)


def traits_by_kind(readings: Sequence[Readings], kinds: tuple[str, ...]) -> dict[str, Floats]:
    """All traits of those kinds that were read."""
    result = {kind: [item.traits for item in readings if item.kind == kind] for kind in kinds}
    return {kind: np.concatenate(traits) for kind, traits in result.items() if traits}


def figures(rule: CollapseRule, readings: Sequence[Readings]) -> list[dict[str, Any]]:
    """Proximity of each group, plain JSON values: percentiles 1, 10, 50, 90 and 99, both ends, share of alarms."""
    result = []
    for item in readings:
        values = proximities(rule, item.traits)
        result.append(
            {
                "name": item.name,
                "kind": item.kind,
                "fitted": item.fitted,
                "readings": len(values),
                "quantiles": [round(float(x), 4) for x in np.quantile(values, [0.01, 0.1, 0.5, 0.9, 0.99])],
                "lowest": round(float(values.min()), 4),
                "highest": round(float(values.max()), 4),
                "alarms": round(float((values >= ALARM).mean()), 4),
            }
        )
    return result


def roc(rule: CollapseRule, calm: Floats, alarmed: Floats) -> tuple[float, list[tuple[float, float]]]:
    """Area under the curve, and the curve: share of false alarms and share of loops found at each threshold."""
    from sklearn.metrics import roc_auc_score, roc_curve

    scores = np.concatenate([proximities(rule, calm), proximities(rule, alarmed)])
    truth = np.concatenate([np.zeros(len(calm)), np.ones(len(alarmed))])
    false, true, _ = roc_curve(truth, scores)
    return float(roc_auc_score(truth, scores)), [(float(a), float(b)) for a, b in zip(false, true, strict=True)]
