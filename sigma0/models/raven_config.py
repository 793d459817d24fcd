"""Configuration of the Raven family: Huginn (arXiv 2502.05171) and the retrofits of Llama, TinyLlama and OLMo-2.

Fields are named as the published checkpoints name them. Both kinds call themselves `huginn_raven`; what tells them
apart is the layout of a block, which the tensors show.
"""

import math
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from sigma0.models.cache_name import CACHE_NAMES
from sigma0.models.config_checks import MAX_LOOPS, check_dtype, check_prompts, check_rope

Layout = Literal["sandwich", "pre", "post"]
LAYOUTS = ("sandwich", "pre", "post")
STATE_MODES = ("random", "embed-init", "skip-adapter")
# What the published files can be told to do otherwise, and what is implemented.
_ONLY = {
    "injection_type": "linear",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "block_class_name": "SandwichBlock",
    "test_time_noise": 0,
    "bias": False,
}


@strict
class RavenConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of a Raven checkpoint: prelude, core, which is looped, and coda.

    Attributes:
        n_embd: D.
        n_layers_in_prelude: Layers that run once for each token, before the loops.
        n_layers_in_recurrent_block: Layers of the core.
        n_layers_in_coda: Layers that run where a token is read.
        mean_recurrence: Loops that the checkpoint was trained for, on average.
        recurrence: T, loops at full depth; None takes `mean_recurrence`.
        stride: Loops of the core that a pass runs; a depth is counted in passes then, T / stride of them.
        init_scale: Start states are 0 times their published size by default, which is zero; 1.0 draws them.
        state_seed: What start states are drawn from, with the position.
        initial_state_mode: `random` starts from such a state, `embed-init` from the prelude's output, and
            `skip-adapter` runs loop 1 on it without the adapter.
        block_layout: `sandwich` (Huginn: norms before and after, on the sum), `pre` (Llama), `post` (OLMo-2); None
            until the tensors or the named file say it.
        init_values: `embed_scale` and `std`, of embeddings and start states.

    Raises:
        ValueError: Naming the field that is wrong or asks for what is not implemented.
    """

    model_type = "huginn_raven"
    keys_to_ignore_at_inference = list(CACHE_NAMES)  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "n_embd",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "rms_norm_eps": "norm_eps",
    }
    default_theta = 50000.0

    n_embd: int = 5280
    n_heads: int = 55
    n_layers: int = 8
    n_layers_in_prelude: int = 2
    n_layers_in_recurrent_block: int = 4
    n_layers_in_coda: int = 2
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 17920
    vocab_size: int = 65536
    padded_vocab_size: int | None = None
    padding_multiple: int = 1
    block_size: int = 4096
    max_position_embeddings: int | None = None
    mean_recurrence: int = 32
    mean_backprop_depth: int = 8
    recurrence: int | None = None
    stride: int = 1
    init_scale: float | int = 0.0
    state_seed: int = 0
    initial_state_mode: str = "random"
    block_layout: str | None = None
    norm_eps: float | int = 1e-6
    qk_bias: bool = False
    bias: bool = False
    rope_base: float | int = 50000.0
    rope_parameters: dict | None = None  # type: ignore[type-arg]
    tie_embeddings: bool = False
    tie_word_embeddings: bool = False
    init_values: dict | None = None  # type: ignore[type-arg]
    injection_type: str = "linear"
    norm_class_name: str = "RMSNorm_llama"
    mlp_class_name: str = "GatedMLP"
    nonlin_name: str = "SiLU"
    block_class_name: str = "SandwichBlock"
    test_time_noise: float | int = 0
    initializer_range: float | int = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sigma0_prompts: str = "instructions"

    def __post_init__(self, **kwargs: Any) -> None:
        """Fills defaults; the layout by the file that the published config names, where it names one."""
        files = kwargs.pop("auto_map", None) or {}
        if not isinstance(files, dict):
            raise ValueError(f"auto_map must be a mapping, got {files!r}")
        named = str(files.get("AutoModelForCausalLM", ""))
        check_dtype(kwargs.get("torch_dtype") or self.dtype)
        if self.block_layout is None and named.startswith("raven_modeling_minimal"):
            file = named.partition(".")[0]
            self.block_layout = "post" if file.endswith("_olmo") else "pre" if file.endswith("_llama") else "sandwich"
        if self.block_layout is None and self.qk_bias:
            self.block_layout = "sandwich"
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.n_heads
        if self.head_dim is None and self.n_heads:
            self.head_dim = self.n_embd // self.n_heads
        if self.padded_vocab_size is None:
            self.padded_vocab_size = self.vocab_size
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.block_size
        if self.rope_parameters is None and "rope_theta" not in kwargs:
            kwargs["rope_theta"] = self.rope_base
        # absent from freshly converted configs, where it would default to true
        self.tie_word_embeddings = self.tie_embeddings
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: `save_pretrained` would copy this package's source into the checkpoint."""

    @property
    def loops(self) -> int:
        """T, loops of the core at full depth."""
        return self.mean_recurrence if self.recurrence is None else self.recurrence

    @property
    def num_loops(self) -> int:
        """T in passes, as other families call it."""
        return self.loops // self.stride

    @property
    def layout(self) -> Layout:
        """The layout of a block.

        Raises:
            ValueError: Where nothing has said it.
        """
        if self.block_layout is None:
            raise ValueError(
                f"block_layout says nothing of this huginn_raven model: set it to {', '.join(LAYOUTS[:-1])} or "
                f"{LAYOUTS[-1]}"
            )
        return self.block_layout  # type: ignore[return-value]

    @property
    def embed_scale(self) -> float:
        """Factor on embeddings: sqrt(D) in Huginn, whatever `init_values` says; else as it says."""
        if self.block_layout == "sandwich":
            return math.sqrt(self.n_embd)
        return float((self.init_values or {}).get("embed_scale", 1.0))

    @property
    def state_std(self) -> float:
        """Standard deviation of start states at `init_scale` 1, before they are cut at three of them."""
        default = math.sqrt(2 / (5 * self.n_embd))
        if self.block_layout == "sandwich":
            return default * math.sqrt(self.n_embd)
        return float((self.init_values or {}).get("std", default))

    def validate_loops(self) -> None:
        """Checks loops and stride."""
        if not 1 <= self.loops <= MAX_LOOPS:
            name = "mean_recurrence" if self.recurrence is None else "recurrence"
            raise ValueError(f"{name} must lie in 1 to {MAX_LOOPS}, got {self.loops}")
        if self.stride < 1 or self.loops % self.stride:
            fitting = ", ".join(str(stride) for stride in range(1, self.loops + 1) if self.loops % stride == 0)
            raise ValueError(
                f"stride must divide the {self.loops} loops of full depth, got {self.stride}: take one of {fitting}"
            )
        if not 0.0 <= self.init_scale < math.inf:
            raise ValueError(f"init_scale must be a finite number of at least 0, got {self.init_scale}")
        if self.initial_state_mode not in STATE_MODES:
            raise ValueError(f"initial_state_mode must be {' or '.join(STATE_MODES)}, got {self.initial_state_mode!r}")

    def validate_sizes(self) -> None:
        """Checks sizes and head counts."""
        positive = ("n_embd", "n_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
        for name in (*positive, "padded_vocab_size", "max_position_embeddings", "n_layers_in_recurrent_block"):
            if (value := getattr(self, name)) is None or value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("n_layers_in_prelude", "n_layers_in_coda"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        assert self.num_key_value_heads is not None and self.padded_vocab_size is not None
        if self.n_heads % self.num_key_value_heads:
            raise ValueError(f"n_heads={self.n_heads} is no multiple of num_key_value_heads={self.num_key_value_heads}")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size={self.padded_vocab_size} is below vocab_size={self.vocab_size}")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be a finite number of at least 0, got {self.norm_eps}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must lie in 0 to {self.vocab_size - 1}, got {self.pad_token_id}")

    def validate_block(self) -> None:
        """Refuses what is not implemented, by name."""
        if self.block_layout not in (None, *LAYOUTS):
            raise ValueError(f"block_layout must be {', '.join(LAYOUTS)}, got {self.block_layout!r}")
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                raise ValueError(f"{name}={getattr(self, name)!r} is not implemented, only {only!r}")
        if self.block_layout == "sandwich" and self.num_key_value_heads != self.n_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads}: blocks of the sandwich layout have as many as "
                f"n_heads={self.n_heads}"
            )
        if self.qk_bias and self.block_layout in ("pre", "post"):
            raise ValueError(f"qk_bias=True has no place in blocks of the {self.block_layout!r} layout")
        for name in ("embed_scale", "std"):
            value = (self.init_values or {}).get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
                raise ValueError(f"init_values: {name} must be a finite number, got {value!r}")
        check_prompts(self)
        check_rope(self.rope_parameters, self.default_theta)
