"""Limits of a model: ids in its vocabulary, positions in its context, caches made for it, K/V that fit into memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.planes import extra_planes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def check_context(model: "PreTrainedModel", prompt_tokens: int, max_new_tokens: int) -> None:
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


def check_cache(cache: Any, model: Any = None) -> None:
    """Checks that a cache has planes for loops, and those of a model where it is given.

    Raises:
        ValueError: If `cache` is no `DepthCache`, or was made for another model.
    """
    if not isinstance(cache, DepthCache):
        raise ValueError(
            f"the cache is a {type(cache).__name__}, which has no planes for loops; pass model.new_cache() or "
            "leave it out"
        )
    if model is None:
        return
    current, needed = (
        f"{layers} layers, {loops} loops, {stages[0]} layers of prelude and {stages[1]} of coda"
        for layers, loops, stages in (
            (cache.num_layers, cache.total_loops, cache.stages),
            (model.num_block_layers, model.num_loops, model.stages),
        )
    )
    if current != needed:
        raise ValueError(f"past_key_values was made for {current}, this model has {needed}: pass model.new_cache()")


def check_continued(cache: DepthCache, prompt: int, mask: int) -> None:
    """Checks that a filled cache holds the beginning of what it is continued with.

    Args:
        cache: Not empty.
        prompt: Tokens that are passed: the whole text, or what is new of it.
        mask: Length of the attention mask, of the whole text.

    Raises:
        ValueError: Naming the lengths. transformers would slice prompt or mask in silence.
    """
    if mask <= cache.length or mask not in (prompt, cache.length + prompt):
        raise ValueError(
            f"the cache holds {cache.length} tokens, and is continued with a prompt of {prompt} and a mask of {mask}: "
            "pass the whole text, of which the cache holds the beginning, or a new cache"
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


def available_memory() -> int | None:
    """Bytes of main memory that can be had without swapping, as Linux counts them; None on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None where that is unknown."""
    if device.type == "cpu":
        return available_memory()
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
