"""Layers of a shared block: attention over the K/V plane of one loop, and an MLP, each after a norm or between two."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from sigma0.decode.attention import PassRows
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.ops import ROW_DTYPES, Operations, row_norm, runs_triton
from sigma0.models.row_linear import Modules, PackedLinear, is_plain

# Where a norm in half precision is one kernel, without the copies in float32 that transformers' module makes.
_ONE_KERNEL = {"cuda"}


class OuroRMSNorm(Qwen3RMSNorm):  # type: ignore[misc]
    """RMSNorm; in float32 by torch's own function, which rounds as transformers' module does in half precision."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normed `[..., D]`."""
        if hidden_states.dtype is torch.float32:
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        device, traced = hidden_states.device, torch.is_grad_enabled() or torch.compiler.is_compiling()
        plain = self.weight.dtype is hidden_states.dtype in ROW_DTYPES and self.weight.is_contiguous()
        if device.type in _ONE_KERNEL and plain and not traced and runs_triton(device):
            rows = hidden_states.contiguous().view(-1, hidden_states.shape[-1])
            return row_norm(rows, self.weight, self.variance_epsilon).view_as(hidden_states)
        normed: Tensor = super().forward(hidden_states)
        return normed


class OuroAttention(nn.Module):
    """Multi-head attention over the plane of one loop."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.qkv, self.out = PackedLinear("q_proj", "k_proj", "v_proj"), PackedLinear("o_proj")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        plane: int = 0,
        rows: PassRows | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `[B, S, D]`, or of the rows of a pass, `[R, D]`.

        Args:
            hidden_states: Normed input.
            position_embeddings: cos and sin, `[B, S, head_dim]`; of rows as `RotaryTable` has them, `[R, 1, head_dim]`.
            attention_mask: As the attention function takes it.
            past_key_values: Cache with the planes, or None.
            plane: Index of this layer's plane at this loop, `loop * L + layer_idx`.
            rows: The rows of a pass, which may be at different loops; replaces mask, cache and plane.
            **kwargs: For the attention function.
        """
        if rows is not None:
            return self.attend_rows(hidden_states, position_embeddings, rows)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)  # [B, H, S, d]
        keys = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        values = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, keys = apply_rotary_pos_emb(query, keys, *position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, plane)
        attention: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        attended, weights = attention(
            self, query, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), weights

    def attend_rows(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: PassRows
    ) -> tuple[Tensor, None]:
        """Attention of the rows of a pass, `[R, D]`; arguments as `forward` takes them."""
        current: dict[str, Any] = self._modules
        multiply = rows.ops.product(hidden_states.dtype)
        heads = self.qkv(current, hidden_states, multiply).view(
            hidden_states.shape[0], -1, self.head_dim
        )  # [R, H + 2 H_kv, d]
        # counted from what there is, since a rank of several has a part of the heads
        kv_heads = heads.shape[1] // (self.num_key_value_groups + 2)
        turned, values = rotated(heads[:, :-kv_heads], *position_embeddings), heads[:, -kv_heads:]
        query, keys = turned[:, :-kv_heads], turned[:, -kv_heads:]  # [R, H, d], [R, H_kv, d]
        attended = rows.attend(self.layer_idx, query, keys, values, self.scaling)
        return self.out(current, attended.flatten(1), multiply), None


def rms_norm(module: nn.Module, hidden: Tensor, ops: Operations, residual: Tensor | None = None) -> Tensor:
    """`module(hidden)` of rows `[R, D]`, added to `residual`; as `linear`."""
    if type(module) is not OuroRMSNorm or not is_plain(module):
        normed: Tensor = module(hidden)
    else:
        weight: Any = module._parameters["weight"]
        takes = ops.norm_rows is not None and ops.norms(hidden.dtype) and not torch.is_grad_enabled()
        # the function sees the memory of the weight only
        if takes and weight.dtype is hidden.dtype and weight.is_contiguous():
            assert ops.norm_rows is not None
            output: Tensor = ops.norm_rows(hidden, weight, module.variance_epsilon, residual)
            return output
        single = hidden.dtype is torch.float32
        normed = torch.rms_norm(hidden, weight.shape, weight, module.variance_epsilon) if single else module(hidden)
    return normed if residual is None else residual + normed


def rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of `[R, H, d]`: the same numbers as `apply_rotary_pos_emb`, in three operations."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)


class PreNormDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention and MLP, each after a norm; a family may norm what they give as well.

    Attributes:
        norm_names: In the order in which a layer applies them.
        post_norms: Of them, the one after attention and the one after the MLP; None where there are none.
    """

    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.gate_up, self.down = PackedLinear("gate_proj", "up_proj"), PackedLinear("down_proj")
        for name in self.norm_names:
            self.add_module(name, OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def packed_weights(self) -> list[tuple[PackedLinear, Modules]]:
        """The products of a pass over rows, each with the modules that hold its layers."""
        attention, mlp = self.self_attn, self.mlp
        return [
            *((product, attention._modules) for product in (attention.qkv, attention.out)),
            *((product, mlp._modules) for product in (self.gate_up, self.down)),
        ]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """One layer over `[B, S, D]`; `kwargs` go to the attention."""
        if kwargs.get("rows") is not None and is_plain(self.self_attn) and is_plain(self.mlp):
            return self._run_rows(hidden_states, **kwargs)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = self._added(hidden_states, attended, 0)
        transformed = self.mlp(self.post_attention_layernorm(hidden_states))
        return self._added(hidden_states, transformed, 1)

    def _run_rows(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], rows: PassRows) -> Tensor:
        """The same for the rows of a pass, `[R, D]`, of which there are so few that calls of modules are a cost."""
        # out of the dictionaries, since looking modules up by attribute takes as long as a small product
        current: dict[str, Any] = self._modules
        mlp = current["mlp"]._modules
        ops = rows.ops
        normed = rms_norm(current["input_layernorm"], hidden_states, ops)
        attended, _ = current["self_attn"].attend_rows(normed, position_embeddings, rows)
        hidden_states = self._added(hidden_states, attended, 0, ops)
        normed = rms_norm(current["post_attention_layernorm"], hidden_states, ops)
        multiply = ops.product(normed.dtype)
        gate, up = self.gate_up(mlp, normed, multiply).chunk(2, -1)  # [R, F] each
        transformed = self.down(mlp, mlp["act_fn"](gate) * up, multiply)
        return self._added(hidden_states, transformed, 1, ops)

    def _added(self, hidden_states: Tensor, output: Tensor, part: int, ops: Operations | None = None) -> Tensor:
        """The residual with the output of attention (part 0) or MLP (1); `ops` for rows of a pass."""
        if self.post_norms is None:
            return hidden_states + output
        norm: Any = self._modules[self.post_norms[part]]
        if ops is not None:
            return rms_norm(norm, output, ops, hidden_states)
        normed: Tensor = norm(output)
        return hidden_states + normed


class OuroDecoderLayer(PreNormDecoderLayer):
    """Attention and MLP, each between two norms."""

    norm_names = (
        "input_layernorm",
        "input_layernorm_2",
        "post_attention_layernorm",
        "post_attention_layernorm_2",
    )
    post_norms = ("input_layernorm_2", "post_attention_layernorm_2")
