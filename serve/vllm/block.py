"""The layers of a shared block, of vLLM's own parts: one set of weights, and K/V of their own for each loop."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaMLP
from vllm.v1.attention.selector import get_attn_backend


def stored_head_size(head_dim: int, dtype: Any, cache_config: CacheConfig | None) -> int:
    """The size that heads are stored at: their own, or the next one that the attention backend has.

    Raises:
        ValueError: If the backend has none that is as large.
    """
    backend = get_attn_backend(head_dim, dtype, cache_config.cache_dtype if cache_config else None)
    sizes = backend.get_supported_head_sizes()
    if backend.supports_head_size(head_dim):
        return head_dim
    larger = [size for size in sizes if size > head_dim]
    if not larger:
        raise ValueError(f"head_dim={head_dim} is more than {backend.get_name()} takes, which is {max(sizes)}")
    return int(min(larger))


class LoopAttention(nn.Module):
    """Attention of one layer: weights that all loops share, and an `Attention` with K/V for each loop.

    Args:
        config: Of the model.
        loops: Loops that are run.
        layer: Its place within the block, of `config.num_hidden_layers`.
        vllm_config: Of the engine.
        prefix: Name of the module, with the layer's place in it.
    """

    def __init__(self, config: Any, loops: int, layer: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        cache_config, quant_config = vllm_config.cache_config, vllm_config.quant_config
        ranks = get_tensor_model_parallel_world_size()
        if config.num_attention_heads % ranks:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} is no multiple of tensor_parallel_size={ranks}"
            )
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // ranks
        # with fewer K/V heads than ranks vLLM gives each rank a copy
        self.kv_heads = max(1, config.num_key_value_heads // ranks)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            self.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.stored = stored_head_size(self.head_dim, vllm_config.model_config.dtype, cache_config)
        # vLLM tells caches apart by the one number in their names, which counts planes here
        self.planes = nn.ModuleList(
            Attention(
                self.heads,
                self.stored,
                self.head_dim**-0.5,
                num_kv_heads=self.kv_heads,
                cache_config=cache_config,
                quant_config=quant_config,
                prefix=prefix.replace(f".{layer}.", f".{loop * config.num_hidden_layers + layer}.") + ".attn",
            )
            for loop in range(loops)
        )

    def forward(self, positions: Tensor, hidden: Tensor, loop: int) -> Tensor:
        """Attention `[N, D]` of normed states `[N, D]` over the K/V of a loop, counted from 0."""
        qkv, _ = self.qkv_proj(hidden)
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        query, key, value = qkv.split(widths, dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        attended = self.planes[loop](*(self._padded(part) for part in (query, key, value)))  # [N, H * stored]
        if self.stored != self.head_dim:
            attended = attended.view(-1, self.heads, self.stored)[..., : self.head_dim].flatten(1)
        output: Tensor = self.o_proj(attended)[0]
        return output

    def _padded(self, part: Tensor) -> Tensor:
        """`[N, heads * head_dim]` with zeros after each head, which change neither scores nor values."""
        if self.stored == self.head_dim:
            return part
        heads = part.view(*part.shape[:-1], -1, self.head_dim)  # [N, heads, head_dim]
        return F.pad(heads, (0, self.stored - self.head_dim)).flatten(-2)


class LoopLayer(nn.Module):
    """Attention and MLP after a norm each; a family may norm what they give as well.

    Args:
        post_norms: Names of the norms after attention and MLP, or None.
        config: As `LoopAttention` takes it, as are the others.
        loops: Loops that are run.
        layer: Its place.
        vllm_config: Of the engine.
        prefix: Its name.
    """

    def __init__(
        self,
        post_norms: tuple[str, str] | None,
        config: Any,
        loops: int,
        layer: int,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = LoopAttention(config, loops, layer, vllm_config, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.post_norms = post_norms
        for name in ("input_layernorm", "post_attention_layernorm", *(post_norms or ())):
            self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, positions: Tensor, hidden: Tensor, loop: int) -> Tensor:
        """One layer over states `[N, D]` at positions `[N]`, at a loop counted from 0."""
        modules: dict[str, Any] = self._modules
        hidden = self._added(hidden, self.self_attn(positions, modules["input_layernorm"](hidden), loop), 0)
        return self._added(hidden, self.mlp(modules["post_attention_layernorm"](hidden)), 1)

    def _added(self, hidden: Tensor, output: Tensor, part: int) -> Tensor:
        """The residual with the output of attention (part 0) or MLP (1)."""
        if self.post_norms is not None:
            output = getattr(self, self.post_norms[part])(output)
        return hidden + output
