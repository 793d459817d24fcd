"""Limits of a model: ids in its vocabulary, positions in its context, K/V that fit into memory."""

from typing import Protocol

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sigma0.decode.planes import extra_planes


class CachingModel(Protocol):
    """A looped model, as far as the size of its K/V goes; no weights are needed."""

    config: PreTrainedConfig

    @property
    def num_block_layers(self) -> int:
        """L."""

    @property
    def stages(self) -> tuple[int, int]:
        """Layers of prelude and coda."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of the K/V."""

    @property
    def device(self) -> torch.device:
        """Where the K/V lie."""


def check_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Checks that prompt and new tokens fit into the model's context.

    Raises:
        ValueError: Naming the lengths and the limit.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones exceed the model's context of {limit}; "
            "shorten the prompt or lower max_new_tokens"
        )


def check_ids(input_ids: Tensor, vocabulary: int, look: bool = True) -> None:
    """Checks that a tensor is a batch of token ids.

    Args:
        input_ids: Integers `[B, S]`.
        vocabulary: Size of the vocabulary.
        look: Also check the values, which waits for their device.

    Raises:
        ValueError: Naming the shape, the dtype or the id.
    """
    if input_ids.dim() != 2:
        way = "pass ids[None]" if input_ids.dim() == 1 else "a batch has one row of ids for each sequence"
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(input_ids.shape)}: {way}")
    if not input_ids.numel():
        raise ValueError(f"the prompt is empty: input_ids have shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be whole numbers such as int64, got {input_ids.dtype}")
    if not look or input_ids.is_meta:
        return
    least, most = torch.stack(torch.aminmax(input_ids)).tolist()
    if least < 0 or most >= vocabulary:
        # on CUDA such an id would end the whole process
        raise ValueError(
            f"input_ids hold {most if most >= vocabulary else least}, outside of the model's vocabulary of "
            f"{vocabulary}: the tokenizer does not fit the model"
        )


def kv_bytes(model: CachingModel, length: int, batch: int, planes: int) -> int:
    """Bytes of the keys and values of a cache.

    Args:
        model: A looped model.
        length: Tokens of each sequence.
        batch: Sequences.
        planes: Loops with K/V of their own.
    """
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_position = model.num_block_layers * planes + sum(extra_planes(model.stages))
    return int(2 * per_position * heads * width * model.dtype.itemsize * length * batch)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None where that is unknown."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return None


def check_memory(model: CachingModel, length: int, batch: int, planes: int, allocated: int = 0) -> None:
    """Checks that K/V fit into free memory, before any of them is allocated.

    Args:
        model: A looped model.
        length: Tokens of each sequence, prompt and new ones.
        batch: Sequences.
        planes: Loops with K/V of their own.
        allocated: Bytes that the cache has already.

    Raises:
        ValueError: Naming the size and the free memory.
    """
    needed, free = kv_bytes(model, length, batch, planes), free_memory(model.device)
    if free is not None and needed - allocated > free:
        raise ValueError(
            f"the K/V of {batch} x {length} tokens would take {_amount(needed)} ({planes} loops, "
            f"{_amount(kv_bytes(model, 1, 1, planes))} a token), and {_amount(free)} are free on {model.device}: lower "
            "max_new_tokens (--max-new-tokens), or the batch"
        )


def _amount(size: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    number = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
