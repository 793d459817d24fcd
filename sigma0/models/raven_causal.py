"""Raven with its head: the stages of a pass over rows, and how a prompt is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.exits import ExitRule, Selection, no_gate_logits, select_exits
from sigma0.decode.ops import LoopEndWeights
from sigma0.decode.parallel import broadcaster
from sigma0.models.looped_causal import LoopedForCausalLM, masked_reader
from sigma0.models.ouro_block import rms_norm
from sigma0.models.outputs import LoopedModelOutput
from sigma0.models.raven import RavenModel, RavenPreTrainedModel, packed_blocks
from sigma0.models.raven_config import RavenConfig
from sigma0.models.raven_forced import read_beside_full_depth
from sigma0.models.row_linear import Modules, PackedLinear


class RavenForCausalLM(RavenPreTrainedModel, LoopedForCausalLM):
    """Raven with its output head.

    `forward` also takes `initial_state`, `[B, S, D]`, before loop 1; `forward` and `generate` take `num_steps`, T for
    the length of the call, so that calls at the same time cannot differ in it.
    """

    model_inputs = frozenset({"initial_state"})
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: RavenConfig) -> None:
        super().__init__(config, RavenModel(config))

    def forward(self, *args: Any, num_steps: int | None = None, **kwargs: Any) -> Any:
        """See `LoopedForCausalLM.forward`, with `num_steps` loops at full depth in place of the model's own."""
        with self.of_steps(num_steps):
            return super().forward(*args, **kwargs)

    def generate(self, *args: Any, num_steps: int | None = None, **kwargs: Any) -> Any:
        """As `DepthGenerationMixin.generate`, which takes `exit_config`; `num_steps` sets T for this call."""
        with self.of_steps(num_steps):
            return super().generate(*args, **kwargs)

    # keep their signatures for whoever asks
    update_wrapper(forward, LoopedForCausalLM.forward, assigned=())
    update_wrapper(generate, LoopedForCausalLM.generate, assigned=())

    @contextmanager
    def of_steps(self, num_steps: int | None) -> Iterator[None]:
        """Sets T, in loops; None leaves it.

        Raises:
            ValueError: For a number that T cannot be.
        """
        current = self.config.recurrence
        if num_steps is not None and type(num_steps) is not int:
            raise ValueError(f"num_steps must be a whole number of loops, got {num_steps!r}")
        try:
            if num_steps is not None:
                self.config.recurrence = num_steps
                self.config.validate_loops()
            yield
        finally:
            self.config.recurrence = current

    @property
    def num_loops(self) -> int:
        """T, in passes."""
        loops: int = self.transformer.num_loops
        return loops

    @property
    def num_block_layers(self) -> int:
        """L, K/V layers of a pass."""
        layers: int = self.transformer.num_block_layers
        return layers

    @property
    def stages(self) -> tuple[int, int]:
        """Layers of prelude and coda."""
        stages: tuple[int, int] = self.transformer.stages
        return stages

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Start states and embeddings `[R, 2 D]` of ids `[R]` at positions `[R]`."""
        embedded = self.transformer.embed(token_ids)
        return torch.cat([self.transformer.start(embedded, positions), embedded], dim=-1)

    def prelude(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """Start states and what every loop reads, `[R, 2 D]`, of rows as they have entered."""
        width = self.config.n_embd
        injected = self._run(self.transformer.prelude, hidden[:, width:], rows, self.num_block_layers)
        embeds = self.config.initial_state_mode == "embed-init"
        return torch.cat([injected if embeds else hidden[:, :width], injected], dim=-1)

    def loop(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """One pass of the core over rows `[R, 2 D]`."""
        model, width = self.transformer, self.config.n_embd
        injected, core = hidden[:, width:], model.core_block
        multiply = rows.ops.product(hidden.dtype)
        for step in range(self.config.stride):
            state = model.adapt(model._modules, hidden, multiply)
            if self.config.initial_state_mode == "skip-adapter" and step == 0:
                first = rows.loops(hidden.device) == 0
                state = torch.where(first[:, None], injected, state)
            state = self._run(core, state, rows, step * len(core))
            hidden = torch.cat([state, injected], dim=-1)
        return hidden

    def norm(self, hidden: Tensor) -> Tensor:
        """A loop ends without a norm."""
        return hidden

    def gate(self, hidden: Tensor) -> Tensor:
        """Logits `[R]` of a gate that never leaves: there is none."""
        return no_gate_logits(hidden)

    def loop_end_weights(self) -> LoopEndWeights:
        """No norm, no gate."""
        return LoopEndWeights(None)

    def read(self, hidden: Tensor, rows: PassRows | None = None) -> Tensor:
        """Logits `[R, V]` of rows `[R, 2 D]`, through the coda."""
        assert rows is not None or not self.stages[1], "a coda reads K/V"
        model, state = self.transformer, hidden[:, : self.config.n_embd]
        ops = self._operations_on(hidden.device) if rows is None else rows.ops
        if self.config.layout == "sandwich":
            state = rms_norm(model.ln_f, state.contiguous(), ops)
        if rows is not None:
            state = self._run(model.coda, state, rows, self.num_block_layers + len(model.prelude))
        return self.head(rms_norm(model.ln_f, state, ops))

    def head(self, hidden: Tensor) -> Tensor:
        """See `LoopedForCausalLM.head`; what pads the vocabulary is left out."""
        return self._unpadded(super().head(hidden))

    def read_states(self, hidden_states: Tensor) -> Tensor:
        """See `LoopedForCausalLM.read_states`; likewise."""
        return self._unpadded(super().read_states(hidden_states))

    def _unpadded(self, logits: Tensor) -> Tensor:
        vocabulary = self.config.vocab_size
        return logits if logits.shape[-1] == vocabulary else logits[..., :vocabulary]

    def readable(self, states: Tensor) -> Tensor:
        """See `LoopedForCausalLM.readable`.

        Raises:
            ValueError: Where K/V are in few bits, which a coda that is read at every loop does not know of.
        """
        if self.kv_config.is_coded:
            raise ValueError("a coda is read at every loop over K/V as computed alone: load the model with kv='full'")
        return read_beside_full_depth(self.transformer, states)

    def _run(self, layers: Any, hidden: Tensor, rows: PassRows, first: int) -> Tensor:
        """Layers over rows `[R, D]`, from one of the K/V layers on."""
        tables = self.transformer._rotary_table.rows(rows.positions(hidden.device), rows.longest, hidden)
        for index, layer in enumerate(layers):
            hidden = layer(hidden, rows=rows, layer=first + index, position_embeddings=tables)
        return hidden

    def reserve_tables(self, longest: int, like: Tensor) -> None:
        """Rotary embeddings of so many positions."""
        self.transformer._rotary_table.reserve(longest, like)

    def block_weights(self) -> Iterator[tuple[PackedLinear, Modules]]:
        """The products of all layers, and of the adapter."""
        yield from packed_blocks(self.transformer)

    def needs_cache(self, rule: ExitRule) -> bool:
        """Whether exits are read one after the other, over the coda's K/V.

        The coda of a position sees how those before it were read: a prompt whose last position alone is read costs
        little more for that, a whole text much.
        """
        return not rule.is_known_beforehand

    def read_exits(
        self, rule: ExitRule, outputs: LoopedModelOutput, keep: slice | Tensor, at_full_depth: bool
    ) -> tuple[Selection, Tensor]:
        """See `LoopedForCausalLM.read_exits`."""
        cache, states = outputs.past_key_values, outputs.loop_states
        assert states is not None
        length = states.shape[2]
        if rule.is_known_beforehand or cache is None:
            head = masked_reader(self.read_states, cache)
            exits = select_exits(rule, states[:, :, keep], None, head, broadcaster(self), at_full_depth)
            return exits, head(outputs.last_hidden_state[:, keep])
        indices = torch.arange(length)[keep].tolist()
        first = cache.length - length + min(indices, default=length)
        if cache.segments is not None and first < cache.segments.coded.max():
            raise ValueError(
                "whole segments of K/V in few bits are stored before a rule has read them here, and a coda's are those "
                "of that reading: read the last position alone (logits_to_keep=1), or under the rules full or fixed"
            )
        cache.lacks_final = cache.lacks_final or not at_full_depth
        result = [self._read_position(rule, outputs, index, at_full_depth) for index in indices]
        parts = [torch.cat([vars(exits)[name] for exits, _ in result], dim=axis) for name, axis in _AXES.items()]
        return Selection(*parts), torch.cat([logits for _, logits in result], dim=1)

    @torch.no_grad()
    def _read_position(
        self, rule: ExitRule, outputs: LoopedModelOutput, index: int, at_full_depth: bool
    ) -> tuple[Selection, Tensor]:
        """Where a position of a prompt is read, and its logits `[B, 1, V]`.

        Args:
            rule: When a token may stop.
            outputs: Of all loops; the coda's K/V of this position are those of its reading afterwards.
            index: Of the position among the S.
            at_full_depth: Likewise.
        """
        cache, states, start = outputs.past_key_values, outputs.loop_states, outputs.start_states
        assert cache is not None and states is not None and start is not None
        batch, length = states.shape[1], states.shape[2]
        place = cache.length - length + index
        device = states.device
        seen = cache.seen(cache.length)
        sequences = torch.arange(batch, device=device)
        where = torch.full_like(sequences, place)
        positions = where if seen is None else (seen[:, : place + 1].sum(1) - 1).clamp_min(0)
        rows = PassRows(
            cache.planes,
            cache.placement(cache.length),
            RowIndices(sequences, where, positions, torch.zeros_like(where)),
            self.operations,
            cache.length,
            None if seen is None else seen[:, place],
        )

        def read(hidden: Tensor) -> Tensor:
            return self.read(hidden.reshape(batch, -1), rows)

        states, start = states[:, :, index : index + 1], start[:, index : index + 1]
        head = masked_reader(read, cache)
        exits = select_exits(rule, states, None, head, broadcaster(self), at_full_depth, start)
        return exits, head(exits.hidden)[:, None]

    def loop_logits(self, outputs: LoopedModelOutput, keep: slice | Tensor) -> Tensor:
        """Logits of every loop, `[T, B, S', V]`, as a model of so many loops has them.

        Raises:
            ValueError: After cached positions, whose codas were not read at every loop, or with K/V in few bits.
        """
        assert outputs.loop_states is not None
        cache, length = outputs.past_key_values, outputs.loop_states.shape[2]
        if cache is not None and cache.segment is not None:
            raise ValueError("a coda is read at every loop over K/V as computed alone: leave output_loop_states out")
        if cache is not None and cache.length != length:
            raise ValueError("output_loop_states reads the coda of all positions at every loop: pass the whole text")
        seen = None if cache is None else cache.seen(length)
        read = [self.transformer.read_prompt(states, seen, None)[:, keep] for states in outputs.loop_states]
        return torch.stack([self.read_states(hidden) for hidden in read])


# Fields of a selection, and the axis along which positions follow each other.
_AXES = {"hidden": 1, "depths": 1, "met": 1, "diverged": 1}
