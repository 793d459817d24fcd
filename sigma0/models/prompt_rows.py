"""What every looped model's forward over a prompt starts with: cache, mask and positions that fit each other."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask

from sigma0.decode.kv_cache import DepthCache
from sigma0.models.cache_name import named_cache
from sigma0.models.limits import check_cache


@dataclass(frozen=True)
class PromptRows:
    """The rows of a prompt."""

    cache: DepthCache | None  # Planes that they are written to; None for none
    # Which cache positions are no pads, bool `[B, cached + S]`, or a 4-D mask; None where all are seen
    seen: Tensor | None
    mask: Tensor | None  # As the attention function takes it
    position_ids: Tensor  # `[B, S]`, or `[1, S]`
    count: int  # Of them that are no pads


def prompt_rows(
    config: PreTrainedConfig,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: DepthCache | None,
    loops: int,
    training: bool,
) -> PromptRows:
    """Readies a forward over `[B, S, D]`.

    Args:
        config: The model's.
        hidden_states: Embeddings.
        attention_mask: `[B, cached + S]` of 0 and 1, or a 4-D mask, which is passed on unchanged.
        position_ids: `[B, S]`; by default counted from the mask without the pads.
        past_key_values: Planes to continue; no rows may be in flight.
        loops: To be run.
        training: Whether layers are checkpointed, which leaves out the cache.

    Raises:
        ValueError: For a cache or a mask that does not fit.
    """
    batch, length, _ = hidden_states.shape
    if past_key_values is not None:
        check_cache(past_key_values)
        if training:
            raise ValueError("gradient checkpointing runs layers without a cache: leave it out")
        if past_key_values.in_flight is not None:
            raise ValueError("tokens of this cache wait for their deeper loops: call the model with its head instead")
    seen = attention_mask if attention_mask is None or attention_mask.dim() == 4 else attention_mask.bool()
    if past_key_values is not None:
        past_key_values.open(loops, batch)
        past_key_values.encode(past_key_values.length)
        if seen is None or seen.dim() == 2:
            seen = past_key_values.join_mask(seen, batch, length)
    elif seen is not None and seen.dim() == 2 and tuple(seen.shape) != (batch, length):
        raise ValueError(f"attention_mask has shape {tuple(seen.shape)}, the input {(batch, length)}")
    if position_ids is None:
        position_ids = positions(seen, 0 if past_key_values is None else past_key_values.length, hidden_states)
    mask = create_causal_mask(
        config=config,
        inputs_embeds=hidden_states,
        attention_mask=seen,
        **named_cache(past_key_values),
        position_ids=position_ids,
    )
    return PromptRows(past_key_values, seen, mask, position_ids, _real_tokens(seen, batch, length))


def positions(seen: Tensor | None, past: int, inputs: Tensor) -> Tensor:
    """Positions `[B, S]`, or `[1, S]`, of inputs `[B, S, ...]` after `past` cached ones, without the pads."""
    length = inputs.shape[1]
    if seen is None or seen.dim() == 4:
        return torch.arange(past, past + length, device=inputs.device)[None]
    return (seen.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


def _real_tokens(seen: Tensor | None, batch: int, length: int) -> int:
    if seen is None or seen.dim() == 4:
        return batch * length
    return int(seen[:, -length:].sum())
