"""The base model of families whose loop is a stack of layers over what the loop before it left: Ouro, Nanbeige."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from sigma0.decode.attention import PassRows
from sigma0.decode.exits import no_gate_logits
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import PlainBlock
from sigma0.decode.ops import MOST_ROWS, TORCH, EndWeights, LoopEndWeights
from sigma0.decode.parallel import check_heads
from sigma0.models.cache_name import given_cache, named_cache
from sigma0.models.fused_rows import block_of, can_fuse, run_fused
from sigma0.models.looped import LoopedPreTrainedModel
from sigma0.models.looped_causal import LoopedForCausalLM
from sigma0.models.ouro_block import OuroRMSNorm, PreNormDecoderLayer, rms_norm
from sigma0.models.outputs import LoopedModelOutput
from sigma0.models.prompt_rows import prompt_rows
from sigma0.models.rotary_table import RotaryTable
from sigma0.models.row_linear import Modules, PackedLinear, is_plain, plain_weight


class SharedBlockModel(LoopedPreTrainedModel):
    """Embeddings, the shared block and its norm; a family adds its gate.

    Attributes:
        layer_class: Of the block; takes a config and a layer index.
    """

    layer_class: type[nn.Module]
    _keys_to_ignore_on_load_unexpected = ["lm_head"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        check_heads(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.layer_class(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self._rotary_table = RotaryTable(self.rotary_emb)
        self.gradient_checkpointing = False

    @property
    def num_loops(self) -> int:
        """T, loops at full depth, by the name that `recurrence` sets (`attribute_map` where the config has another)."""
        return self.config.num_loops  # type: ignore[no-any-return]

    def end_loop(self, hidden_states: Tensor) -> Tensor:
        """What a loop leaves of the layers' output, `[..., D]`: its norm."""
        normed: Tensor = self.norm(hidden_states)
        return normed

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """What the head reads of the state that a loop leaves, `[..., D]`: the state itself."""
        return hidden_states

    def gate_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits `[...]` of the exit gate for states `[..., D]`; None where the family has none."""
        return None

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        cache: DepthCache | None = None,
        **kwargs: Any,
    ) -> LoopedModelOutput:
        """Runs every loop for every position.

        Args:
            input_ids: `[B, S]`; or
            inputs_embeds: `[B, S, D]`.
            attention_mask: `[B, cached + S]` of 0 and 1, or a 4-D mask, which is passed on unchanged.
            position_ids: `[B, S]`; by default counted from the mask without the pads.
            past_key_values: Planes to continue; no rows may be in flight.
            use_cache: Whether to make and return planes.
            num_loops: Loops to run, by default T.
            cache: Another name of `past_key_values`.
            **kwargs: For the attention function.

        Returns:
            The states after every loop.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, S, D]
        loops = self.num_loops if num_loops is None else num_loops
        checkpointed = self.training and self.gradient_checkpointing
        past_key_values = given_cache(past_key_values, cache)
        if past_key_values is None and use_cache and not checkpointed:
            past_key_values = DepthCache(len(self.layers), self.num_loops)
        rows = prompt_rows(
            self.config, hidden_states, attention_mask, position_ids, past_key_values, loops, checkpointed
        )
        position_embeddings = self.rotary_emb(hidden_states, rows.position_ids)
        start, states = hidden_states, []
        gates: list[Tensor] = []
        for loop in range(loops):
            for index, layer in enumerate(self.layers):
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=rows.mask,
                    past_key_values=past_key_values,
                    plane=loop * len(self.layers) + index,
                    **kwargs,
                )
            hidden_states = self.end_loop(hidden_states)
            states.append(hidden_states)
            gate = self.gate_logits(hidden_states)
            gates += [] if gate is None else [gate]
        if past_key_values is not None:
            past_key_values.commit(hidden_states.shape[1])
            past_key_values.counts.prompt_rows += loops * rows.count
        return LoopedModelOutput(
            last_hidden_state=self.head_input(hidden_states),
            **named_cache(past_key_values),
            loop_states=torch.stack(states),
            gate_logits=torch.stack(gates) if gates else None,
            start_states=start,
        )

    def plain_block(self, longest: int, like: Tensor) -> PlainBlock | None:
        """See `decode.model.LoopedModel.plain_block`."""
        if like.dtype is not torch.float32 or not can_fuse(self.layers, like):
            return None
        parts = block_of(list(self.layers))
        return None if parts is None else (*parts, self._rotary_table.reserve(longest, like))

    def run_rows(self, hidden_states: Tensor, rows: PassRows) -> Tensor:
        """One loop of the layers over the rows of a pass, `[R, D]`, before the norm."""
        fuses = rows.ops.project_rows is not None or (
            rows.ops.run_block is not None
            and not torch.compiler.is_compiling()
            and hidden_states.dtype is torch.float32
            and hidden_states.shape[0] <= MOST_ROWS[torch.float32]
        )
        if fuses and can_fuse(self.layers, hidden_states):
            tables = self._rotary_table.reserve(rows.longest, hidden_states)
            if rows.ops.project_rows is not None:
                return run_fused(self.layers, hidden_states, rows, *tables)
            parts = block_of(list(self.layers))
            if parts is not None:
                return rows.run_block(*parts, hidden_states, tables)
        positions = rows.positions(hidden_states.device)
        position_embeddings = self._rotary_table.rows(positions, rows.longest, hidden_states)
        for layer in self.layers:
            run = layer.forward if is_plain(layer) else layer
            hidden_states = run(hidden_states, position_embeddings=position_embeddings, rows=rows)
        return hidden_states


class SharedBlockForCausalLM(LoopedForCausalLM):
    """Such a model with its head: the stages of a pass over rows."""

    @property
    def num_loops(self) -> int:
        """T, loops at full depth."""
        loops: int = self.model.num_loops
        return loops

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings `[R, D]` of ids `[R]`."""
        return self.model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def readable(self, states: Tensor) -> Tensor:
        """See `LoopedForCausalLM.readable`."""
        readable: Tensor = self.model.head_input(states)
        return readable

    def loop(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """One loop over the rows of a pass, `[R, D]`, before the norm."""
        output: Tensor = self.model.run_rows(hidden, rows)
        return output

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after a loop, `[R, D]`."""
        ops = TORCH if torch.compiler.is_compiling() else self._operations_on(hidden.device)
        return rms_norm(self.model.norm, hidden, ops)

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]` of states `[R, D]`; those of a gate that never leaves where the family has none."""
        logits = self.model.gate_logits(hidden)
        return no_gate_logits(hidden) if logits is None else logits

    def plain_weights(self) -> EndWeights:
        """See `decode.model.LoopedModel.plain_weights`; of norm, embedding and head."""
        current = self.model._modules
        norm, embedding = current["norm"], current["embed_tokens"]
        return EndWeights(
            self._plain("norm", plain_weight(norm, OuroRMSNorm)),
            norm.__dict__.get("variance_epsilon", 0.0),
            embedding=self._plain("enter", plain_weight(embedding, nn.Embedding)),
            head=self._plain("read", self._plain("head", self._head.matrix(self._modules))),
        )

    def plain_block(self, longest: int, like: Tensor) -> PlainBlock | None:
        """See `decode.model.LoopedModel.plain_block`."""
        block: PlainBlock | None = self.model.plain_block(longest, like)
        return None if "loop" in self._replaced else block

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of the norm; a family with a gate adds it."""
        return LoopEndWeights(self.model.norm.weight, self.model.norm.variance_epsilon)

    def reserve_tables(self, longest: int, like: Tensor) -> None:
        """Rotary embeddings of so many positions."""
        self.model._rotary_table.reserve(longest, like)

    def block_weights(self) -> Iterator[tuple[PackedLinear, Modules]]:
        """The products of the block's layers."""
        for module in self.modules():
            if isinstance(module, PreNormDecoderLayer):
                yield from module.packed_weights()
