"""Raven: Huginn (arXiv 2502.05171) and models that were retrofitted with its recurrence (arXiv 2511.07384).

    e   = prelude(embedding)                      once a token, with one plane of K/V
    s_t = core(adapter([s_{t-1}; e]))             loop t, with a plane of K/V for each loop
    read(s) = head(ln_f(coda(s)))                 where a token is read; Huginn norms s before the coda, too

Nothing depends on the loop's index. What is in flight of a token is [s; e], `[2 D]`.

Reading costs a coda, whose K/V fill two planes: one for what is read at the exit, and one for what is read at loop T.
Under `finish` the coda of a token sees the K/V that the tokens before it left when they were read, those of a prompt at
loop T but its last one, which is read by the rule; under `verify` drafts are read so, and what is told to the user from
the second plane alone: full depth throughout.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils.generic import merge_with_config_defaults

from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.parallel import check_heads
from sigma0.decode.planes import FINAL, READ
from sigma0.models.cache_name import given_cache, named_cache
from sigma0.models.looped import LoopedPreTrainedModel, checkpoint_path
from sigma0.models.ouro_block import OuroRMSNorm
from sigma0.models.outputs import LoopedModelOutput
from sigma0.models.prompt_rows import prompt_rows
from sigma0.models.raven_block import RavenBlock
from sigma0.models.raven_config import Layout, RavenConfig
from sigma0.models.raven_parallel import keep_share, plan_of, whole_tensors
from sigma0.models.rotary_table import RotaryTable
from sigma0.models.row_linear import PackedLinear
from sigma0.models.start_states import start_states
from sigma0.models.stored import StoredTensor, read_headers


def layout_of(tensors: Mapping[str, Any]) -> Layout:
    """The layout of a block, by the names of a checkpoint's tensors."""
    names = {name.partition("core_block.")[2] for name in tensors}
    if "0.norm_3.weight" in names:
        return "sandwich"
    return "post" if "0.attn.q_norm.weight" in names else "pre"


class RavenPreTrainedModel(LoopedPreTrainedModel):
    """Loading and saving for the family."""

    config_class = RavenConfig
    base_model_prefix = "transformer"
    # by which transformers finds the embeddings
    _input_embed_layer = "wte"
    _no_split_modules = ["RavenBlock"]  # noqa: RUF012
    # a table that is computed here
    _keys_to_ignore_on_load_unexpected = ["freqs_cis"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, config: RavenConfig | None = None, **kwargs: Any) -> Any:
        """As `LoopedPreTrainedModel.from_pretrained`; the layout of a folder's blocks is what its tensors show."""
        folder = checkpoint_path(*args, **kwargs)
        if config is None:
            config = RavenConfig.from_pretrained(*args)
        tensors = {} if folder is None else read_headers(folder)
        if tensors and isinstance(config, RavenConfig):
            config.block_layout = layout_of(tensors)
        loaded = super().from_pretrained(*args, config=config, **kwargs)
        keep_share(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def whole_state(self) -> dict[str, Tensor]:
        """See `LoopedPreTrainedModel.whole_state`."""
        return whole_tensors(self, super().whole_state())

    @classmethod
    def check_shapes(cls, config: RavenConfig, tensors: Mapping[str, StoredTensor]) -> None:
        """See `LoopedPreTrainedModel.check_shapes`."""
        named = {name.partition("transformer.")[2]: tensor.shape for name, tensor in tensors.items()}
        # of quantised weights a tensor of integers, and its scales
        if not any(name.startswith("adapter.") for name in named):
            raise ValueError("the checkpoint has no transformer.adapter.weight: it is no huginn_raven model")
        assert config.head_dim is not None and config.num_key_value_heads is not None
        heads = (config.n_heads + 2 * config.num_key_value_heads) * config.head_dim
        for field, size, name, axis in (
            ("padded_vocab_size", config.padded_vocab_size, "wte.weight", 0),
            ("n_embd", config.n_embd, "wte.weight", 1),
            ("2 n_embd", 2 * config.n_embd, "adapter.weight", 1),
            ("(n_heads + 2 num_key_value_heads) head_dim", heads, "core_block.0.attn.Wqkv.weight", 0),
            ("2 intermediate_size", 2 * config.intermediate_size, "core_block.0.mlp.fc.weight", 0),
        ):
            shape = named.get(name)
            if shape is not None and shape[axis] != size:
                raise ValueError(
                    f"config.json has {field} = {size}, but transformer.{name} has shape {list(shape)}: use the "
                    "config.json that belongs to these weights"
                )
        for field, stage in (
            ("n_layers_in_prelude", "prelude"),
            ("n_layers_in_recurrent_block", "core_block"),
            ("n_layers_in_coda", "coda"),
        ):
            stored = {name.split(".")[1] for name in named if name.startswith(f"{stage}.")}
            if len(stored) != getattr(config, field):
                raise ValueError(
                    f"config.json has {field} = {getattr(config, field)}, but the weights have {len(stored)} such "
                    "layers: use the config.json that belongs to them"
                )


class RavenModel(RavenPreTrainedModel):
    """Embeddings, prelude, adapter, core, coda and the last norm."""

    _keys_to_ignore_on_load_unexpected = ["freqs_cis", "lm_head"]  # noqa: RUF012

    def __init__(self, config: RavenConfig) -> None:
        check_heads(config)
        super().__init__(config)
        prelude, core, coda = (
            config.n_layers_in_prelude,
            config.n_layers_in_recurrent_block,
            config.n_layers_in_coda,
        )
        assert config.padded_vocab_size is not None
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.prelude = nn.ModuleList(RavenBlock(config, layer) for layer in range(prelude))
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = nn.ModuleList(RavenBlock(config, prelude + layer) for layer in range(core))
        self.coda = nn.ModuleList(RavenBlock(config, prelude + core + layer) for layer in range(coda))
        self.ln_f = OuroRMSNorm(config.n_embd, eps=config.norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self._rotary_table = RotaryTable(self.rotary_emb, pairs=config.layout == "sandwich")
        self.adapt = PackedLinear("adapter")
        self.gradient_checkpointing = False
        self.post_init()

    def init_parallel_plans(self) -> None:
        """See `transformers.PreTrainedModel`; not in the config's class, since layouts differ in what there is."""
        super().init_parallel_plans()
        self._tp_plan |= plan_of(self.config)

    @property
    def num_loops(self) -> int:
        """T, in passes: loops of the core over the stride."""
        return self.config.num_loops  # type: ignore[no-any-return]

    @property
    def num_block_layers(self) -> int:
        """L, K/V layers of a pass: those of the core, for each loop that the pass runs."""
        return self.config.stride * self.config.n_layers_in_recurrent_block  # type: ignore[no-any-return]

    @property
    def stages(self) -> tuple[int, int]:
        """Layers of prelude and coda."""
        return len(self.prelude), len(self.coda)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Scaled embeddings `[..., D]` of ids `[...]`."""
        embedded: Tensor = self.wte(input_ids)
        scale = self.config.embed_scale
        return embedded if scale == 1.0 else embedded * scale

    def start(self, injected: Tensor, positions: Tensor) -> Tensor:
        """States `[..., D]` before loop 1, for tokens at positions `[...]`.

        Args:
            injected: e `[..., D]`.
            positions: What drawn states belong to.
        """
        config = self.config
        if config.initial_state_mode == "embed-init":
            return injected
        if config.init_scale == 0.0:
            return torch.zeros_like(injected)
        places = positions.expand(injected.shape[:-1])
        return start_states(places, config.init_scale * config.state_std, config.state_seed, injected)

    def latent(self, hidden_states: Tensor) -> Tensor:
        """What the coda reads of states `[..., D]`."""
        normed: Tensor = self.ln_f(hidden_states)
        return normed if self.config.layout == "sandwich" else hidden_states

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        initial_state: Tensor | None = None,
        loops_without_grad: int = 0,
        cache: DepthCache | None = None,
        **kwargs: Any,
    ) -> LoopedModelOutput:
        """Runs prelude, every loop, and the coda at full depth, for every position.

        Args:
            input_ids: `[B, S]`; or
            inputs_embeds: `[B, S, D]`, scaled.
            attention_mask: `[B, cached + S]` of 0 and 1, or a 4-D mask, which is passed on unchanged.
            position_ids: `[B, S]`; by default counted from the mask without the pads.
            past_key_values: Planes to continue; no rows may be in flight.
            use_cache: Whether to make and return planes.
            num_loops: Passes to run, by default T.
            initial_state: States before loop 1, `[B, S, D]`; by default as the config says.
            loops_without_grad: Passes at the start that gradients do not go through.
            cache: Another name of `past_key_values`.
            **kwargs: For the attention function.

        Returns:
            The states after every pass, and what the head reads after the last.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        loops = self.num_loops if num_loops is None else num_loops
        checkpointed = self.training and self.gradient_checkpointing
        past_key_values = given_cache(past_key_values, cache)
        if past_key_values is None and use_cache and not checkpointed:
            past_key_values = DepthCache(self.num_block_layers, self.num_loops, stages=self.stages)
        rows = prompt_rows(
            self.config, hidden_states, attention_mask, position_ids, past_key_values, loops, checkpointed
        )
        given = {
            "attention_mask": rows.mask,
            "position_embeddings": self._tables(rows.position_ids, hidden_states),
            **kwargs,
        }
        injected = self._once(self.prelude, hidden_states, self._prelude_planes(), past_key_values, given)
        state = initial_state
        if state is None:
            state = self.start(injected, rows.position_ids)
        elif state.shape != injected.shape:
            raise ValueError(f"initial_state has shape {tuple(state.shape)}, the input {tuple(injected.shape)}")
        start, states = state, []
        for loop in range(loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and loop >= loops_without_grad):
                for step in range(self.config.stride):
                    state = self._core(state, injected, loop, step, past_key_values, given)
            states.append(state)
        last = self.ln_f(self._once(self.coda, self.latent(state), self._coda_planes(), past_key_values, given))
        if past_key_values is not None:
            past_key_values.commit(hidden_states.shape[1])
            past_key_values.counts.prompt_rows += loops * rows.count
        return LoopedModelOutput(
            last_hidden_state=last,
            **named_cache(past_key_values),
            loop_states=torch.stack(states),
            gate_logits=None,
            injected=injected,
            start_states=start,
        )

    def run_prelude(self, embedded: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """What every loop reads, `[B, S, D]`, of embeddings; arguments as `run_coda` takes them."""
        return self._once(self.prelude, embedded, self._prelude_planes(), cache, self._given(positions, embedded))

    def run_core(self, state: Tensor, injected: Tensor, positions: Tensor, loop: int, cache: Any) -> Tensor:
        """States `[B, S, D]` after one pass of the core more, of which the first is 0."""
        for step in range(self.config.stride):
            state = self._core(state, injected, loop, step, cache, self._given(positions, state))
        return state

    def run_coda(self, states: Tensor, seen: Tensor | None, cache: Any, positions: Tensor) -> Tensor:
        """What the head reads of states `[B, S, D]` of one loop, `[B, S, D]`.

        Args:
            states: After that loop.
            seen: Which keys each position sees, bool `[S, K]`; None as a causal attention sees all that there are.
            cache: What K/V are given to, and what they are read from.
            positions: `[B, S]`.
        """
        given = self._given(positions, states, seen)
        read: Tensor = self.ln_f(self._once(self.coda, self.latent(states), self._coda_planes(), cache, given))
        return read

    def _given(self, positions: Tensor, like: Tensor, seen: Tensor | None = None) -> dict[str, Any]:
        """Mask and rotary embeddings for layers over positions `[B, S]`."""
        mask = None
        if seen is not None:
            mask = like.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        return {"attention_mask": mask, "position_embeddings": self._tables(positions, like)}

    def read_prompt(self, states: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """What the head reads of every position, `[B, S, D]`, where all are read at the same loop.

        Args:
            states: `[B, S, D]`.
            attention_mask: `[B, S]`, or 4-D.
            position_ids: As `forward` takes them.
        """
        rows = prompt_rows(self.config, states, attention_mask, position_ids, None, 1, False)
        given = {"attention_mask": rows.mask, "position_embeddings": self._tables(rows.position_ids, states)}
        read: Tensor = self.ln_f(self._once(self.coda, self.latent(states), self._coda_planes(), None, given))
        return read

    def _tables(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and signed sin `[B, S, 1, d]`."""
        cos, sin = self._rotary_table.rows(position_ids.flatten(), int(position_ids.max()) + 1, like)
        shape = (*position_ids.shape, 1, cos.shape[-1])
        return cos.view(shape), sin.view(shape)

    def _core(
        self, state: Tensor, injected: Tensor, loop: int, step: int, cache: DepthCache | None, given: dict[str, Any]
    ) -> Tensor:
        """One loop of the core over `[B, S, D]`."""
        skips = self.config.initial_state_mode == "skip-adapter" and loop == step == 0
        hidden = injected if skips else self.adapter(torch.cat([state, injected], dim=-1))
        first = loop * self.num_block_layers + step * len(self.core_block)
        for index, layer in enumerate(self.core_block):
            hidden = layer(hidden, planes=(first + index,), past_key_values=cache, **given)
        return hidden

    def _once(
        self,
        layers: nn.ModuleList,
        hidden: Tensor,
        planes: list[tuple[int, ...]],
        cache: DepthCache | None,
        given: dict[str, Any],
    ) -> Tensor:
        """Layers that run once, over `[B, S, D]`."""
        for layer, current in zip(layers, planes, strict=True):
            hidden = layer(hidden, planes=current, past_key_values=cache, **given)
        return hidden

    def _prelude_planes(self) -> list[tuple[int, ...]]:
        """Planes of the prelude's layers, as transformers counts them: after all of the core's."""
        first = self.num_loops * self.num_block_layers
        return [(first + index,) for index in range(len(self.prelude))]

    def _coda_planes(self) -> list[tuple[int, ...]]:
        """Both planes of the coda's layers, likewise."""
        first = self.num_loops * self.num_block_layers + len(self.prelude)
        return [(first + 2 * index + READ, first + 2 * index + FINAL) for index in range(len(self.coda))]


def packed_blocks(model: RavenModel) -> Iterator[tuple[PackedLinear, Any]]:
    """The products of a pass over rows, each with the modules that hold its layers."""
    yield model.adapt, model._modules
    for layer in (*model.prelude, *model.core_block, *model.coda):
        yield from layer.packed_weights()
