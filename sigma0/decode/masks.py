"""Packed masks over the ids of a vocabulary, applied to logits."""

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
