"""Logits that are no numbers, weights that make them so, ids that may not follow, and log-probabilities of ids.

A NaN anywhere in the weights makes every logit a NaN, and the argmax of those is a token like any other: unless both
are looked at, a broken checkpoint writes an empty text and reports savings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Replaces a token id that was sampled from logits that are not finite; it is copied to the host with the ids.
BROKEN = -1
NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights are broken, or too large for its dtype; load it with "
    "check=True, or with dtype float32 or bfloat16"
)


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
    """An id and the natural logarithm of its probability, before temperature, penalties and cuts."""

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


def flag_broken(token_ids: Tensor, logits: Tensor) -> Tensor:
    """The ids `[N]`, `BROKEN` where the logits `[N, V]` that they were sampled from are not finite; without a sync.

    Single logits of minus infinity are no fault.
    """
    return torch.where(logits.amax(dim=-1).isfinite().to(token_ids.device), token_ids, BROKEN)


def check_logits(logits: Tensor) -> None:
    """Refuses logits `[N, V]` of which a row has no finite maximum; waits for the device.

    Raises:
        FloatingPointError: If there is such a row.
    """
    if not bool(logits.amax(dim=-1).isfinite().all()):
        raise FloatingPointError(NOT_FINITE)


def check_weights(model: torch.nn.Module) -> None:
    """Refuses a model of which a weight is NaN or infinite.

    One pass over the weights (`aminmax`, a fifth of the time of a copy), and one read of the flags for each device.

    Args:
        model: Any torch module; tensors on the meta device and integers are left out.

    Raises:
        ValueError: Naming the first such tensor.
    """
    flags: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = {}
    # quantised weights have NaN and infinity in their scales; some libraries keep these as buffers
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, weight in named:
        for tensor in stored_parts(weight.detach()):
            if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
                continue
            finite = torch.stack(torch.aminmax(tensor)).isfinite().all()
            flags.setdefault(tensor.device, []).append((name, tensor, finite))
    for named_flags in flags.values():
        are_finite = torch.stack([flag for *_, flag in named_flags]).tolist()
        broken = [(name, tensor) for (name, tensor, _), flag in zip(named_flags, are_finite, strict=True) if not flag]
        if not broken:
            continue
        name, tensor = broken[0]
        nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        others = f", and so do {len(broken) - 1} other tensors" if len(broken) > 1 else ""
        raise ValueError(
            f"{name} holds {nan} NaN and {infinite} infinite numbers of {tensor.numel()} as "
            f"{str(tensor.dtype).removeprefix('torch.')}{others}: get the weights anew, try another dtype, or load "
            "them as they are with check=False (--no-check)"
        )


def stored_parts(weight: Tensor) -> list[Tensor]:
    """What a tensor holds in memory.

    Args:
        weight: Any tensor. One that stands for others (a shard, integers with their scales) names them itself, by
            torch's protocol for such classes.
    """
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None:
        return [weight]
    names, _ = flatten()
    # beside tensors a shard names the processes that share it
    weights = [getattr(weight, name) for name in names]
    return [part for item in weights if isinstance(item, Tensor) for part in stored_parts(item)]
