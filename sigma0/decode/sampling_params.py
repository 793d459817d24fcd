"""Sampling as a request asks for it, and log-probabilities as it gets them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode.masks import forbidden


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; as in transformers, and the two penalties as in OpenAI's protocol.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1].
        top_k: 0 for none.
        min_p: In [0, 1].
        repetition_penalty: Above 0; 1 for none.
        presence_penalty: Subtracted from the logits of ids that occur in the output.
        frequency_penalty: Subtracted from the logits of ids for each occurrence in the output.
        logit_bias: Ids, and what is added to the logit of each before anything else.
        seed: Seed of the random draws; None draws one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


def check_logit_bias(biases: Mapping[int, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Biases of logits as `SamplingParams` has them.

    Args:
        biases: By id.
        vocabulary: V.

    Raises:
        ValueError: For an id that the head does not have, or a bias that is no finite number.
    """
    for token_id, bias in biases.items():
        if type(token_id) is not int or not 0 <= token_id < vocabulary:
            raise ValueError(f"logit_bias takes ids from 0 to {vocabulary - 1}, got {token_id!r:.40}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise ValueError(f"logit_bias takes finite numbers, got {bias!r:.40} for id {token_id}")
    return tuple((token_id, float(bias)) for token_id, bias in biases.items())


@dataclass(frozen=True)
class Alternative:
    """An id and its log-probability.

    Attributes:
        id: The id.
        logprob: Natural logarithm of its probability, before temperature, penalties and cuts.
    """

    id: int
    logprob: float


def logprobs_of(logits: Tensor, token_id: int, count: int) -> tuple[float, tuple[Alternative, ...]]:
    """Log-probability of a token, and the ids of highest probability.

    Args:
        logits: `[V]`, unprocessed.
        token_id: The sampled token.
        count: Number of alternatives; there are fewer where a grammar allows fewer.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = logprobs.topk(min(count, len(logprobs)))
    alternatives = (
        Alternative(index, value)
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        if logits[index] > forbidden(logits.dtype)
    )
    return float(logprobs[token_id]), tuple(alternatives)
