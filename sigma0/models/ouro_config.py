"""Configuration of the Ouro family (arXiv 2510.25741), as its published checkpoints name their fields."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

logger = logging.get_logger(__name__)

# The published configs name <|endoftext|> for every special token; their tokenizer says otherwise.
REPAIRED_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
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


def repaired_tokens(bos: Any, eos: Any, pad: Any) -> dict[str, int] | None:
    """The right special ids of the published checkpoints, for a config that has 0 for all; else None.

    Args:
        bos: `bos_token_id` as stored.
        eos: `eos_token_id` as stored, an id or a list.
        pad: `pad_token_id` as stored; the published configs leave it out.
    """
    return REPAIRED_TOKENS if bos == 0 and eos in (0, [0]) and pad in (0, None) else None


@strict
class OuroConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of an Ouro checkpoint.

    Attributes:
        total_ut_steps: T, times that the block of `num_hidden_layers` layers is applied to a token.
        early_exit_threshold: q of the published exit rule; 1.0 runs every loop.
        early_exit_step: Loop to read every token at, counted from 0; None leaves it to the threshold.
        sigma0_prompts: `instructions` for a model that follows them; `bare` for one that only continues questions of
            the kind that it was trained on, for which `sigma0 solve` adds no instructions.

    Raises:
        ValueError: For bad sizes, unknown names, sliding windows, and RoPE variants whose frequencies change with
            length: K/V of one token are written at different times, so they must not depend on the length of the text.
    """

    model_type = "ouro"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    default_theta = 10000.0
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None  # type: ignore[type-arg]
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    total_ut_steps: int = 4
    early_exit_threshold: float | int = 1.0
    early_exit_step: int | None = None
    sigma0_prompts: str = "instructions"

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills defaults and repairs the published special ids."""
        kwargs.pop("auto_map", None)
        check_dtype(kwargs.get("torch_dtype") or self.dtype)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # zero heads are refused once everything is known
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        repaired = repaired_tokens(self.bos_token_id, self.eos_token_id, self.pad_token_id)
        if repaired is not None:
            logger.warning_once(
                "this checkpoint's config names 0 for bos, eos and pad, which its tokenizer contradicts; using "
                "bos 1, eos 2, pad 0"
            )
            for name, value in repaired.items():
                setattr(self, name, value)
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: `save_pretrained` would copy this package's source into the checkpoint."""

    def validate_loops(self) -> None:
        """Checks the number of loops, and that the exit lies within them."""
        if self.total_ut_steps < 1:
            raise ValueError(f"total_ut_steps must be at least 1, got {self.total_ut_steps}")
        if self.total_ut_steps > MAX_LOOPS:
            raise ValueError(f"total_ut_steps must be at most {MAX_LOOPS}, got {self.total_ut_steps}")
        if not 0.0 < self.early_exit_threshold <= 1.0:
            raise ValueError(f"early_exit_threshold must lie in (0, 1], got {self.early_exit_threshold}")
        if self.early_exit_step is not None and not 0 <= self.early_exit_step < self.total_ut_steps:
            raise ValueError(
                f"early_exit_step counts from 0 and must be below {self.total_ut_steps}, got {self.early_exit_step}"
            )

    def validate_attention(self) -> None:
        """Checks sizes and head counts; allows full attention with fixed rotary frequencies only."""
        for name in SIZES:
            if (value := getattr(self, name)) is None or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        other = sorted(set(self.layer_types or ()) - {"full_attention"})
        if self.use_sliding_window or other:
            raise ValueError(
                f"only full attention is supported, got use_sliding_window={self.use_sliding_window}, {other}"
            )
        check_rope(self.rope_parameters, self.default_theta)

    def validate_prompts(self) -> None:
        """Checks the style of prompts."""
        if self.sigma0_prompts not in PROMPTS:
            raise ValueError(f"sigma0_prompts must be {' or '.join(PROMPTS)}, got {self.sigma0_prompts!r}")

    def validate_block(self) -> None:
        """Checks activation, norm epsilon and pad id."""
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r} is no activation that transformers knows, such as silu")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be a finite number of at least 0, got {self.rms_norm_eps}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id must lie in 0 to vocab_size - 1 = {self.vocab_size - 1}, got {self.pad_token_id}"
            )


def check_dtype(dtype: Any) -> None:
    """Checks that a stored dtype is a floating-point dtype of torch.

    Raises:
        ValueError: Naming it.
    """
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (known is not None and isinstance(known, torch.dtype) and known.is_floating_point) or dtype in (None, "auto"):
        return
    raise ValueError(f"dtype={dtype!r} in config.json is no floating-point dtype, such as float32 or bfloat16")


def check_rope(parameters: Mapping[str, Any] | None, default_theta: float) -> None:
    """Checks that rotary frequencies are known and do not change with the length of the text.

    Raises:
        ValueError: Naming what is wrong.
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
