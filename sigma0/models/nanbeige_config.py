"""Configuration of the Nanbeige4.2 family, as its published checkpoints name their fields."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

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

# Switches that no released checkpoint turns on, and what each would make the model do.
UNRELEASED = {
    "loop_share_kv": "share K/V between loops",
    "skip_ngram_for_input": "embed n-grams",
    "insert_ngram_layer_idx": "embed n-grams",
    "enable_hyper_connection": "run several residual streams",
    "enable_mhc": "run several residual streams",
    "enable_h_res_identity": "run several residual streams",
    "enable_depth_attention": "attend over depth",
    "enable_double_loop_split": "loop over a part of the layers",
    "loop_middle_layers": "loop over a part of the layers",
    "qk_layernorm": "norm queries and keys",
    "attention_bias": "add biases to attention",
    "mlp_bias": "add biases to the MLP",
}
UNRELEASED_PREFIXES = {"emb_": "embed n-grams", "ngram_": "embed n-grams"}
# Of those prefixes: how n-grams would be joined, which switches nothing on.
HARMLESS = ("ngram_fused_mode",)


@strict
class NanbeigeConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of a Nanbeige4.2 checkpoint.

    Layers, width and heads are by default those of Nanbeige4.2-3B; vocabulary, MLP width and positions are not, since
    they are only told by its `config.json`.

    Attributes:
        num_loops: T, times that the stack of `num_hidden_layers` layers is applied to a token.
        loop_loss_weights: Where it is not empty, T is its length + 1, whatever `num_loops` says; of no other use here.
        skip_loop_final_norm: Loops pass on the state before the norm, which then stands ahead of the head alone.
        head_dim: A number of its own; `hidden_size / num_attention_heads` where it is left out.
        sigma0_prompts: As `OuroConfig` has it.

    Raises:
        ValueError: For bad sizes, options of the published code that no released checkpoint uses, and RoPE variants
            whose frequencies change with length.
    """

    model_type = "nanbeige"
    keys_to_ignore_at_inference = list(CACHE_NAMES)  # noqa: RUF012
    default_theta = 10000.0
    base_model_tp_plan = BLOCK_TP_PLAN

    vocab_size: int = 32000
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 22
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None  # type: ignore[type-arg]
    attention_dropout: float | int = 0.0
    num_loops: int = 2
    loop_loss_weights: list | None = None  # type: ignore[type-arg]
    skip_loop_final_norm: bool = False
    sigma0_prompts: str = "instructions"

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills defaults."""
        kwargs.pop("auto_map", None)
        check_dtype(kwargs.get("torch_dtype") or self.dtype)
        fill_heads(self)
        if self.loop_loss_weights:
            self.num_loops = len(self.loop_loss_weights) + 1
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: `save_pretrained` would copy this package's source into the checkpoint."""

    def validate_released(self) -> None:
        """Refuses the switches of `UNRELEASED`; names of the same kind that are off, and their details, pass."""
        for name, value in vars(self).items():
            effect = UNRELEASED.get(name) or next(
                (effect for start, effect in UNRELEASED_PREFIXES.items() if name.startswith(start)), None
            )
            # off: absent, null, false, 0 or empty
            if effect and value and name not in HARMLESS:
                raise ValueError(
                    f"{name}={value!r} would {effect}, which no released Nanbeige4.2 does and sigma0 does not run"
                )

    def validate_loops(self) -> None:
        """Checks the number of loops."""
        check_loops(self, "num_loops")

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
