"""Configuration of the Ouro family (arXiv 2510.25741), as its published checkpoints name their fields."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from sigma0.models.cache_name import CACHE_NAMES
from sigma0.models.config_checks import (
    BLOCK_TP_PLAN,
    check_block,
    check_dtype,
    check_full_attention,
    check_loops,
    check_prompts,
    check_rope,
    check_sizes,
    fill_heads,
)

logger = logging.get_logger(__name__)

# The published configs name <|endoftext|> for every special token; their tokenizer says otherwise.
REPAIRED_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


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
    keys_to_ignore_at_inference = list(CACHE_NAMES)  # noqa: RUF012
    attribute_map = {"num_loops": "total_ut_steps"}  # noqa: RUF012
    default_theta = 10000.0
    base_model_tp_plan = BLOCK_TP_PLAN

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
        fill_heads(self)
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
        check_loops(self, "total_ut_steps")
        if not 0.0 < self.early_exit_threshold <= 1.0:
            raise ValueError(f"early_exit_threshold must lie in (0, 1], got {self.early_exit_threshold}")
        if self.early_exit_step is not None and not 0 <= self.early_exit_step < self.total_ut_steps:
            raise ValueError(
                f"early_exit_step counts from 0 and must be below {self.total_ut_steps}, got {self.early_exit_step}"
            )

    def validate_attention(self) -> None:
        """Checks sizes and head counts; allows full attention with fixed rotary frequencies only."""
        check_sizes(self)
        check_full_attention(self)
        check_rope(self.rope_parameters, self.default_theta)

    def validate_prompts(self) -> None:
        """Checks the style of prompts."""
        check_prompts(self)

    def validate_block(self) -> None:
        """Checks activation, norm epsilon and pad id."""
        check_block(self)
