"""Packed masks over the ids of a vocabulary, applied to logits, and the log-probabilities of ids."""

from dataclasses import dataclass

import torch
from torch import Tensor


def forbidden(dtype: torch.dtype) -> float:
    """The logit of an id that may not follow.

    Finite, so that entropies and divergences of masked logits are numbers: 0 times it is 0. Its probability is 0.
    """
    return torch.finfo(dtype).min


def mask_logits(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits `[..., V]`, `forbidden` where a bit of int32 `[..., ceil(V / 32)]` is not set."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]]  # [..., V]
    return logits.masked_fill(allowed == 0, forbidden(logits.dtype))


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
