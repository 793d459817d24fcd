"""The kernels' statistics straight from their definitions: float64, one row at a time, no shared code."""

import math

import numpy as np


def loop_end(
    states, gates, mode, threshold, total, patience=2, min_loops=1, growth=0.1, spiral=math.pi / 3, eps=2**-52
):
    """What loop t = len(states) tells of one token.

    Args:
        states: h_1 ... h_t, rows of a float64 array.
        gates: Gate logits of the same loops.
        mode: Exit rule.
        threshold: Its q or eps.
        total: T.
        patience: Loops running for `accel`.
        min_loops: First loop that may stop.
        growth: m.
        spiral: theta.
        eps: Of the dtype whose noise counts.
    """
    loops = len(states)
    survival, cumulative = 1.0, 0.0
    for logit in gates:
        hazard = 1 / (1 + math.exp(-logit))
        cumulative += hazard * survival
        survival *= 1 - hazard
    result = [steps(states[:t], mode) for t in range(1, loops + 1)]
    change, bend, gain, turning = result[-1]
    radius, angle, residual, turns = spectrum(states)
    fate = None
    if loops >= 3:
        newest = np.linalg.norm(states[-1] - states[-2])
        longest = max(np.linalg.norm(difference(states, t)) for t in range(max(2, loops - 3), loops))
        grown = newest / longest if longest > 0 else 0.0
        speaks = residual <= 0.5 and loops >= 4
        if newest <= 4 * eps * np.linalg.norm(states[-1]):
            fate = "contract"
        elif grown >= 1 + growth or (speaks and radius >= 1 + growth):
            fate = "diverge"
        elif turning >= spiral or (speaks and turns and angle >= spiral) or grown >= 1:
            fate = "spiral"
        else:
            fate = "contract"
    streak = 0
    for t in range(1, loops + 1):
        good = t >= 3 and result[t - 1][1] < threshold
        if mode == "accel":
            good = good and np.linalg.norm(difference(states, t)) <= 0.9 * np.linalg.norm(difference(states, t - 1))
        streak = streak + 1 if good else 0
    met = {
        "qexit": cumulative >= threshold and threshold < 1,
        "converge": loops >= 2 and change < threshold,
        "accel": streak >= patience,
        "accel-steps": streak >= patience,
        "none": False,
    }[mode]
    decision = 1 if met and loops >= min(min_loops, total) else 2 if loops >= total else 0
    return [change, bend, gain, turning, radius, angle, residual, hazard], fate, decision


def difference(states, loop):
    """D_t, t counted from 2."""
    return states[loop - 1] - states[loop - 2]


def steps(states, mode):
    """change, bend, gain, turning."""
    loops = len(states)
    if loops < 2:
        return 0.0, 0.0, 0.0, 0.0
    newest, before = difference(states, loops), np.linalg.norm(states[-2])
    size = np.linalg.norm(newest)
    change = over(size, before)
    if loops < 3:
        return change, 0.0, 0.0, 0.0
    older = difference(states, loops - 1)
    length = np.linalg.norm(older)
    scale = size + length if mode == "accel-steps" else before
    bend = over(np.linalg.norm(newest - older), scale) if length else 0.0
    gain = over(size, length) if length else 0.0
    turning = math.acos(np.clip(newest @ older / (size * length), -1, 1)) if size * length else 0.0
    return change, bend, gain, turning


def over(numerator, denominator):
    return min(numerator / denominator, 1e30) if denominator else (1e30 if numerator else 0.0)


def spectrum(states):
    """radius, angle, residual, and whether the roots are complex; by numpy's least squares and roots."""
    kept = [difference(states, t) for t in range(max(2, len(states) - 3), len(states) + 1)] if len(states) > 1 else []
    if len(kept) < 2 or not np.linalg.norm(kept[-2]):
        return 0.0, 0.0, 1.0, False
    first = len(kept) == 2
    if not first:
        a, b = kept[-2], kept[-3]
        both = (a @ a) * (b @ b)
        first = both - (a @ b) ** 2 < 0.01 * both or not both
    if first:
        if not np.linalg.norm(kept[-1]):
            return 0.0, 0.0, 1.0, False
        root = kept[-1] @ kept[-2] / (kept[-2] @ kept[-2])
        left = np.linalg.norm(kept[-1] - root * kept[-2]) / np.linalg.norm(kept[-1])
        return abs(root), math.pi if root < 0 else 0.0, min(left, 1.0), False
    triples = [(kept[s], kept[s - 1], kept[s - 2]) for s in range(2, len(kept))]
    target = np.concatenate([triple[0] for triple in triples])
    matrix = np.stack([np.concatenate([triple[k] for triple in triples]) for k in (1, 2)], axis=1)
    solution, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    roots = np.roots([1, -solution[0], -solution[1]])
    largest = max(roots, key=abs)
    left = np.linalg.norm(target - matrix @ solution) / np.linalg.norm(target)
    complex_roots = solution[0] ** 2 + 4 * solution[1] < 0
    angle = abs(np.angle(largest))
    return abs(largest), angle, min(left, 1.0), bool(complex_roots)


def collapse(logits, before, chosen, entropies):
    """What one row of logits and the ids so far tell; `entropies` are those of the tokens before."""
    logits = np.asarray(logits, dtype=np.float64)
    finite = logits[np.isfinite(logits)]
    shifted = np.exp(logits - finite.max())
    chances = shifted / shifted.sum()
    entropy = -sum(chance * math.log(chance) for chance in chances if chance > 0)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    margin = chances[order[0]] - chances[order[1]]
    mean, variance = 0.0, 0.0
    for number, value in enumerate(entropies):
        step = value - mean
        mean, variance = (value, 0.0) if number == 0 else (mean + 0.15 * step, 0.85 * (variance + 0.15 * step * step))
    drop = (mean - entropy) / math.sqrt(max(variance, 0.05)) if len(entropies) >= 8 else 0.0
    ids = [*before, order[0] if chosen is None else chosen]
    return [entropy, margin, drop, *repetition(ids)], order[:2], ids


def repetition(ids):
    """periodicity, its lag, echo, distinct share."""
    best, lag = 0.0, 0
    for period in range(1, 65):
        span = max(period, 27)
        if len(ids) >= span + period:
            share = sum(ids[-1 - age] == ids[-1 - age - period] for age in range(span)) / span
            if share > best:
                best, lag = share, period
    window = ids[-128:]
    grams = [tuple(window[place : place + 4]) for place in range(len(window) - 3)]
    echoes = sum(gram in grams[:place] for place, gram in enumerate(grams))
    return best, lag, echoes / max(1, len(grams)), len(set(window)) / len(window)
