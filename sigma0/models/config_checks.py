"""Checks that the configurations of all looped families share; each raises a `ValueError` that names the field."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES_THAT_CHANGE_WITH_LENGTH = ("dynamic", "longrope")
# Far above any looped model that was published (64), and low enough that one forward ends.
MAX_LOOPS = 4096
PROMPTS = ("instructions", "bare")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Attention by heads and the MLP by its width, as transformers shards a block of these names over processes.
BLOCK_TP_PLAN = {
    **dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
    **dict.fromkeys((f"layers.*.mlp.{name}_proj" for name in ("gate", "up")), "colwise"),
    "layers.*.mlp.down_proj": "rowwise",
}


def fill_heads(config: Any) -> None:
    """Fills the defaults of `num_key_value_heads` and `head_dim`; zero heads are refused by `check_sizes`."""
    if config.num_key_value_heads is None:
        config.num_key_value_heads = config.num_attention_heads
    if config.head_dim is None and config.num_attention_heads:
        config.head_dim = config.hidden_size // config.num_attention_heads


def check_dtype(dtype: Any) -> None:
    """A stored dtype is a floating-point dtype of torch."""
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (known is not None and isinstance(known, torch.dtype) and known.is_floating_point) or dtype in (None, "auto"):
        return
    raise ValueError(f"dtype={dtype!r} in config.json is no floating-point dtype, such as float32 or bfloat16")


def check_loops(config: Any, field: str) -> None:
    """The number of loops lies in 1 to `MAX_LOOPS`."""
    loops = getattr(config, field)
    if loops < 1:
        raise ValueError(f"{field} must be at least 1, got {loops}")
    if loops > MAX_LOOPS:
        raise ValueError(f"{field} must be at most {MAX_LOOPS}, got {loops}")


def check_sizes(config: Any, names: Iterable[str] = SIZES) -> None:
    """Sizes are there and at least 1, and K/V heads divide the query heads."""
    for name in names:
        if (value := getattr(config, name)) is None or value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )


def check_full_attention(config: Any) -> None:
    """No layer attends to a window."""
    sliding = getattr(config, "use_sliding_window", None)
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if sliding or other:
        raise ValueError(f"only full attention is supported, got use_sliding_window={sliding}, {other}")


def check_rope(parameters: Mapping[str, Any] | None, default_theta: float) -> None:
    """Rotary frequencies are known and fixed.

    K/V of one token are written at different times, so they must not depend on the length of the text.
    """
    rope_type = (parameters or {}).get("rope_type", "default")
    if rope_type in ROPE_TYPES_THAT_CHANGE_WITH_LENGTH:
        raise ValueError(
            f"rope_type '{rope_type}' changes its frequencies as the text grows, so K/V written earlier no longer "
            "fit; use default, linear, yarn or llama3"
        )
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {rope_type!r} is not known; use default, linear, yarn or llama3")
    theta = (parameters or {}).get("rope_theta", default_theta)
    if not isinstance(theta, float | int) or not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be a finite number above 0, got {theta!r}")


def check_prompts(config: Any) -> None:
    """The style of prompts is known."""
    if config.sigma0_prompts not in PROMPTS:
        raise ValueError(f"sigma0_prompts must be {' or '.join(PROMPTS)}, got {config.sigma0_prompts!r}")


def check_block(config: Any) -> None:
    """Activation, norm epsilon and pad id."""
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} is no activation that transformers knows, such as silu")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ValueError(f"rms_norm_eps must be a finite number of at least 0, got {config.rms_norm_eps}")
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ValueError(
            f"pad_token_id must lie in 0 to vocab_size - 1 = {config.vocab_size - 1}, got {config.pad_token_id}"
        )
