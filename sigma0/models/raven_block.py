"""A layer of a Raven model, in three layouts that share names:

    sandwich (Huginn)   x = norm_2(x + attn(norm_1(x)));  x = norm_4(x + mlp(norm_3(x)))
    pre (Llama)         x = x + attn(norm_1(x));          x = x + mlp(norm_2(x))
    post (OLMo-2)       x = x + norm_1(attn(x));          x = x + norm_2(mlp(x))

`post` norms queries and keys over all heads at once, before they are rotated; `sandwich` adds a bias to both and
rotates neighbouring pairs of a head, the others halves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from sigma0.decode.attention import PassRows
from sigma0.decode.kv_cache import DepthCache
from sigma0.models.ouro_block import OuroRMSNorm, rms_norm
from sigma0.models.raven_config import RavenConfig
from sigma0.models.row_linear import Modules, PackedLinear


def turn_pairs(heads: Tensor) -> Tensor:
    """Swaps the two numbers of neighbouring pairs, `[..., d]`; the table's sines carry the sign."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    return pairs.flip(-1).flatten(-2)


def turn_halves(heads: Tensor) -> Tensor:
    """Swaps the two halves of a head, `[..., d]`; as `turn_pairs`."""
    return heads.roll(heads.shape[-1] // 2, -1)


class RavenAttention(nn.Module):
    """Multi-head attention; the K/V layer and the plane that it writes are the caller's business."""

    def __init__(self, config: RavenConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim, self.heads, self.kv_heads = config.head_dim, config.n_heads, config.num_key_value_heads
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.turn = turn_pairs if config.layout == "sandwich" else turn_halves
        self.Wqkv = nn.Linear(config.n_embd, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(self.heads * self.head_dim, config.n_embd, bias=False)
        self.qkv, self.out = PackedLinear("Wqkv"), PackedLinear("proj")
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, self.head_dim))
        if config.layout == "post":
            self.q_norm = OuroRMSNorm(self.heads * self.head_dim, eps=config.norm_eps)
            self.k_norm = OuroRMSNorm(self.kv_heads * self.head_dim, eps=config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        planes: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Tensor:
        """Attention of `[B, S, D]`.

        Args:
            hidden_states: Input.
            position_embeddings: cos and signed sin as `RotaryTable` has them, `[B, S, 1, d]`.
            attention_mask: As the attention function takes it.
            past_key_values: Cache with the planes, or None.
            planes: Index of the plane, as transformers counts them, that is written and read; K/V are also written to
                those after it.
            **kwargs: For the attention function.
        """
        heads = self.Wqkv(hidden_states).unflatten(-1, (-1, self.head_dim))  # [B, S, H + 2 H_kv, d]
        query, keys, values = self._rotated(heads, position_embeddings)
        query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))  # [B, H, S, d]
        if past_key_values is not None:
            for plane in planes[1:]:
                past_key_values.update(keys, values, plane)
            keys, values = past_key_values.update(keys, values, planes[0])
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, _ = attention(self, query, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        output: Tensor = self.proj(attended.flatten(-2))
        return output

    def attend_rows(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: PassRows, layer: int
    ) -> Tensor:
        """Attention of the rows of a pass, `[R, D]`.

        Args:
            hidden_states: Input.
            position_embeddings: cos and signed sin, `[R, 1, d]`.
            rows: The rows, each at the plane that it writes.
            layer: Index of the K/V layer.
        """
        current: dict[str, Any] = self._modules
        multiply = rows.ops.product(hidden_states.dtype)
        heads = self.qkv(current, hidden_states, multiply).view(len(hidden_states), -1, self.head_dim)
        attended = rows.attend(layer, *self._rotated(heads, position_embeddings), self.scaling)
        return self.out(current, attended.flatten(1), multiply)

    def _rotated(self, heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[..., H, d]` and keys `[..., H_kv, d]`, and values, of all heads `[..., H + 2 H_kv, d]`."""
        values = heads[..., self.heads + self.kv_heads :, :]
        query, keys = heads[..., : self.heads, :], heads[..., self.heads : self.heads + self.kv_heads, :]
        if self.config.qk_bias:
            bias = self.qk_bias.to(heads.dtype)
            query, keys = query + bias[0, 0], keys + bias[1, 0]
        if self.config.layout == "post":
            query = self.q_norm(query.flatten(-2)).unflatten(-1, (-1, self.head_dim))
            keys = self.k_norm(keys.flatten(-2)).unflatten(-1, (-1, self.head_dim))
        cos, signed_sin = position_embeddings
        query, keys = (torch.addcmul(part * cos, self.turn(part), signed_sin) for part in (query, keys))
        return query, keys, values


class RavenMLP(nn.Module):
    """Gate and up in one matrix, SiLU on the gate, which comes first."""

    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)
        self.gate_up, self.down = PackedLinear("fc"), PackedLinear("proj")

    def forward(self, hidden_states: Tensor, rows: PassRows | None = None) -> Tensor:
        """`[..., D]`; with the short products of a pass over rows where these are given."""
        if rows is None:
            gate, up = self.fc(hidden_states).chunk(2, -1)
            output: Tensor = self.proj(F.silu(gate) * up)
            return output
        current: dict[str, Any] = self._modules
        multiply = rows.ops.product(hidden_states.dtype)
        gate, up = self.gate_up(current, hidden_states, multiply).chunk(2, -1)  # [R, F] each
        return self.down(current, F.silu(gate) * up, multiply)


class RavenBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention and MLP, with norms where the layout has them."""

    def __init__(self, config: RavenConfig, layer_idx: int) -> None:
        super().__init__()
        self.layout = config.layout
        self.attn = RavenAttention(config, layer_idx)
        self.mlp = RavenMLP(config)
        for index in range(1, 5 if self.layout == "sandwich" else 3):
            self.add_module(f"norm_{index}", OuroRMSNorm(config.n_embd, eps=config.norm_eps))

    def stacked_parts(self) -> dict[str, tuple[int, list[int]]]:
        """Parameters that hold heads or a width of the MLP in parts: by name, their axis and the sizes of the parts."""
        config = self.attn.config
        assert config.head_dim is not None and config.num_key_value_heads is not None
        query, keys = config.n_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        parts = {"attn.Wqkv.weight": (0, [query, keys, keys]), "mlp.fc.weight": (0, 2 * [config.intermediate_size])}
        if config.qk_bias:
            parts["attn.qk_bias"] = (2, [config.n_heads])
        if self.layout == "post":
            parts |= {"attn.q_norm.weight": (0, [query]), "attn.k_norm.weight": (0, [keys])}
        return parts

    def packed_weights(self) -> list[tuple[PackedLinear, Modules]]:
        """The products of a pass over rows, each with the modules that hold its layers."""
        attention, mlp = self.attn, self.mlp
        return [
            *((product, attention._modules) for product in (attention.qkv, attention.out)),
            *((product, mlp._modules) for product in (mlp.gate_up, mlp.down)),
        ]

    def forward(self, hidden_states: Tensor, rows: PassRows | None = None, layer: int = 0, **kwargs: Any) -> Tensor:
        """One layer over `[B, S, D]`, or over the rows of a pass, `[R, D]`.

        Args:
            hidden_states: Input.
            rows: The rows of a pass; None for a prompt.
            layer: Index of the K/V layer of those rows.
            **kwargs: For the attention.
        """

        def attend(x: Tensor) -> Tensor:
            if rows is None:
                output: Tensor = self.attn(x, **kwargs)
                return output
            return self.attn.attend_rows(x, kwargs["position_embeddings"], rows, layer)

        def norm(index: int, x: Tensor, residual: Tensor | None = None) -> Tensor:
            module: nn.Module = self._modules[f"norm_{index}"]
            if rows is not None:
                return rms_norm(module, x, rows.ops, residual)
            normed: Tensor = module(x)
            return normed if residual is None else residual + normed

        output: Tensor
        if self.layout == "sandwich":
            hidden_states = norm(2, hidden_states + attend(norm(1, hidden_states)))
            output = norm(4, hidden_states + self.mlp(norm(3, hidden_states), rows))
        elif self.layout == "pre":
            hidden_states = hidden_states + attend(norm(1, hidden_states))
            output = hidden_states + self.mlp(norm(2, hidden_states), rows)
        else:
            hidden_states = norm(1, attend(hidden_states), hidden_states)
            output = norm(2, self.mlp(hidden_states, rows), hidden_states)
        return output
