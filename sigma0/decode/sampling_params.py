"""Sampling as a request asks for it, and log-probabilities as it gets them."""

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
        seed: Seed of the random draws; None draws one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


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
