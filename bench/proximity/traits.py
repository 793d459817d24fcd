"""What the parts of the proximity are made of, in their order: repetition of ids, and a model's certainty."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sigma0.decode.transfer import Ints
from sigma0.kernels.collapse import ALPHA, FLOOR, WARM_UP, WINDOW, repetition_of

Floats = npt.NDArray[np.float64]
# Tokens that a model reads together; the first WINDOW of each are read with little before them.
CHUNK = 1024


def repetition(ids: Ints, places: Ints) -> Floats:
    """periodicity, echo and sameness once each number of ids is out, `[N, 3]`.

    Args:
        ids: A text, `[L]`.
        places: Numbers of ids, each at least 1, `[N]`.
    """
    found = []
    for part in np.array_split(places, max(1, len(places) // 256)):
        ring = np.zeros((len(part), WINDOW), dtype=np.int64)
        for row, length in enumerate(part.tolist()):
            numbers = np.arange(max(0, length - WINDOW), length)
            ring[row, numbers % WINDOW] = ids[numbers]
        periodicity, _, echo, distinct = repetition_of(torch.from_numpy(ring), torch.from_numpy(part))
        found.append(torch.stack([periodicity, echo, 1 - distinct], dim=-1).double().numpy())
    return np.concatenate(found)


def certainty(model: Any, ids: Ints, on_chunk: Callable[[], None] = lambda: None) -> Floats:
    """Fall of the entropy and lead of the likeliest id where each id is chosen, `[L, 2]`; 0 for the first id.

    Args:
        model: A causal model, read by teacher forcing.
        ids: A text, `[L]`.
        on_chunk: Told of each chunk.
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
        on_chunk()
    return np.stack([_drops(entropies), margins], axis=1)


def _drops(entropies: Floats) -> Floats:
    """Negative z of each entropy against the exponential mean and variance of those before it."""
    mean = variance = 0.0
    drops = np.zeros(len(entropies))
    for number, entropy in enumerate(entropies.tolist()):
        if number >= WARM_UP:
            drops[number] = (mean - entropy) / max(variance, FLOOR) ** 0.5
        step = entropy - mean
        mean, variance = (
            (entropy, 0.0) if number == 0 else (mean + ALPHA * step, (1 - ALPHA) * (variance + ALPHA * step * step))
        )
    return drops
