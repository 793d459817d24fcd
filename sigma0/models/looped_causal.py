"""The head's side of every looped family: a forward that reads each position at the loop that its exit rule picks."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import TransformersKwargs, can_return_tuple

from sigma0.config import ExitConfig
from sigma0.decode.attention import PassRows
from sigma0.decode.exits import ExitRule, Selection, select_exits
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.lockstep import catch_up, enter_pending
from sigma0.decode.logits import mask_logits
from sigma0.decode.model import PlainBlock
from sigma0.decode.ops import EndWeights, Operations, operations
from sigma0.decode.parallel import broadcaster, tp_size
from sigma0.decode.stats import PathReader
from sigma0.models.cache_name import given_cache, named_cache
from sigma0.models.hf_generate import DepthGenerationMixin
from sigma0.models.limits import check_cache, check_ids
from sigma0.models.looped import LoopedPreTrainedModel
from sigma0.models.outputs import LoopedCausalLMOutput, LoopedModelOutput, joined
from sigma0.models.prompt_rows import positions
from sigma0.models.row_linear import Modules, PackedLinear, PackedWeightsMixin, Product

# Tokens of a prompt that run through all loops together; bounds the memory of activations.
PROMPT_CHUNK = 1024
# Arguments that transformers and its tools pass to any model, beside the named ones.
FORWARD_KEYS = frozenset(TransformersKwargs.__optional_keys__) | {"return_dict", "token_type_ids", "use_kernels"}


def masked_reader(read: Callable[[Tensor], Tensor], cache: DepthCache | None) -> Callable[[Tensor], Tensor]:
    """A head whose logits are of ids that grammars allow after a prompt, where the cache says which.

    Args:
        read: Logits `[B S, V]` of states `[B S, D]`, or `[B, S, V]` of `[B, S, D]`.
        cache: Of the prompt.
    """
    if cache is None or cache.start_masks is None:
        return read
    masks = cache.start_masks  # [B, W]

    def read_masked(states: Tensor) -> Tensor:
        logits = read(states)
        if logits.dim() == 3:
            return mask_logits(logits, masks[:, None])
        return mask_logits(logits, masks.repeat_interleave(len(logits) // len(masks), 0))

    return read_masked


class LoopedForCausalLM(DepthGenerationMixin, PackedWeightsMixin, LoopedPreTrainedModel):
    """A looped model with its output head; the logits of a position are read at the loop that the exit rule picks."""

    # stages of a pass that a class computes otherwise than the class above it that says their weights
    _replaced: frozenset[str] = frozenset()
    # arguments of the forward that the base model takes beside the usual ones
    model_inputs: frozenset[str] = frozenset()
    _multiply: Product = staticmethod(F.linear)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: Any, model: LoopedPreTrainedModel) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, model)
        # some checkpoints pad it; nothing beyond the vocabulary is ever read
        outputs = getattr(config, "padded_vocab_size", None) or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, outputs, bias=False)
        self._head = PackedLinear("lm_head")
        self.post_init()
        if outputs % tp_size(config) and not config.tie_word_embeddings:
            # transformers 5.17 gathers no shards of different sizes: every process then keeps the whole head
            del self._tp_plan["lm_head"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._replaced = frozenset() if "plain_weights" in vars(cls) else cls._replaced.union(vars(cls))

    def _plain(self, stage: str, weight: Tensor | None) -> Tensor | None:
        """A weight of a stage, where that is no other than the family's."""
        return None if stage in self._replaced else weight

    @abstractmethod
    def block_weights(self) -> Iterator[tuple[PackedLinear, Modules]]:
        """The products of a pass over rows, each with the modules that hold its layers."""

    def packed_weights(self) -> Iterator[tuple[PackedLinear, Modules]]:
        """The products of a pass over rows and of its reading, each with the modules that hold its layers."""
        yield from self.block_weights()
        yield self._head, self._modules

    @abstractmethod
    def reserve_tables(self, longest: int, like: Tensor) -> None:
        """Makes whatever passes over so many positions read beside parameters, for states of this device and dtype."""

    def reserve_positions(self, longest: int, like: Tensor) -> Hashable:
        """Readies tables and packed weights for passes over so many positions (`decode.model.LoopedModel`)."""
        self.reserve_tables(longest, like)
        self.pack_weights()
        self._multiply = self.operations.product(like.dtype)
        return (self._multiply,)

    def plain_weights(self) -> EndWeights:
        """See `decode.model.LoopedModel.plain_weights`: none, unless a family says otherwise."""
        return EndWeights()

    def plain_block(self, longest: int, like: Tensor) -> PlainBlock | None:
        """See `decode.model.LoopedModel.plain_block`: none, unless a family says otherwise."""
        return None

    def prelude(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """What loop 1 starts from, `[R, W]`: what has entered, where there is no prelude."""
        return hidden

    def read(self, hidden: Tensor, rows: PassRows | None = None) -> Tensor:
        """Logits `[R, V]` of normed states `[R, D]`."""
        return self.head(hidden)

    def readable(self, states: Tensor) -> Tensor:
        """What the head reads of every loop of whole texts, `[T, B, S, D]`: their states.

        A family with a coda reads each token at the loop in question, and those before it at loop T.

        Args:
            states: `[T, B, S, D]`, of texts without pads on the left.
        """
        return states

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of what the head reads, `[R, D]`."""
        # programs are compiled after `reserve_positions`
        compiling = torch.compiler.is_compiling()
        multiply = self._multiply if compiling else self._operations_on(hidden.device).product(hidden.dtype)
        return self._head(self._modules, hidden, multiply)

    def _operations_on(self, device: torch.device) -> Operations:
        return operations(self.backend, device, self.deterministic)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DepthCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        exit_config: ExitConfig | Mapping[str, Any] | None = None,
        output_loop_states: bool = False,
        cache: DepthCache | None = None,
        **kwargs: Any,
    ) -> LoopedCausalLMOutput:
        """Logits of each position at the loop that the exit rule picks.

        A single token after a filled `DepthCache` is decoded: passes run until it has stopped, and its deeper loops
        follow beside later tokens (`finish`) or never (`drop`). Anything longer is a prefill: every loop runs for
        every position, and the exit is picked from them.

        Args:
            input_ids: `[B, S]`; or
            inputs_embeds: `[B, S, D]`.
            attention_mask: `[B, cached + S]` of 0 and 1.
            position_ids: `[B, S]`.
            past_key_values: A `DepthCache`.
            labels: `[B, S]`, -100 ignored; the family says what the loss is.
            use_cache: Whether to make and return a `DepthCache`.
            logits_to_keep: Number of last positions with logits, 0 for all, or their indices.
            exit_config: The exit rule; by default the one of `resolve_exit_config(None)`.
            output_loop_states: Also return states, gate logits and logits of every loop; a single token after a
                cache is then a prefill.
            cache: Another name of `past_key_values`.
            **kwargs: For the attention function, and `num_items_in_batch` for the loss.

        Raises:
            ValueError: For bad settings, a cache that is no `DepthCache`, or a mask whose shape does not fit.
            TypeError: For an unknown argument, or a cache under both names.
        """
        unknown = sorted(set(kwargs) - FORWARD_KEYS - self.model_inputs)
        if unknown:
            raise TypeError(f"forward takes no argument {', '.join(unknown)}")
        config = self.resolve_exit_config(exit_config)
        rule = self.exit_rule(config)
        # `verify` emits the tokens of full depth, so every position is read at loop T
        verified = config.after_exit == "verify"
        loops = self.num_loops if verified else rule.last_loop
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None:
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        cache = given_cache(past_key_values, cache)
        if inputs_embeds is None:
            # looking at the ids waits for the GPU: once for a prompt is cheap, once for a token or training step is not
            check_ids(inputs, self.config.vocab_size, look=inputs.device.type == "cpu" or not (self.training or cache))
            # embeddings take no narrower integers
            inputs = input_ids = inputs.long()
        if cache is not None:
            check_cache(cache, self)
            if verified and cache.lacks_final:
                raise ValueError(
                    "after_exit='verify' cannot go on with this cache: tokens in it were read at their exits, and the "
                    "coda of full depth has no K/V of them; start a new cache, or keep the exit rule"
                )
            cache.open(loops, inputs.shape[0])
            enter_pending(self, cache, attention_mask)
            if cache.length and inputs.shape[1] == 1 and not cache.prefilling and not output_loop_states:
                if labels is not None or kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
                    raise ValueError(
                        "a single token after a filled cache is decoded: labels, output_hidden_states and "
                        "output_attentions have no meaning there; pass the whole text without a cache"
                    )
                return self._decode(input_ids, attention_mask, position_ids, cache, config)
            catch_up(self, cache)
        if labels is not None:
            use_cache = False
        elif self.needs_cache(rule):
            use_cache = True
        if cache is None and labels is None and self.kv_config.is_coded:
            # what is read over K/V in few bits is so with and without a cache that is kept
            cache = self.new_cache()
            cache.open(loops, inputs.shape[0])
        outputs = self.run_prompt(
            logits_to_keep,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=use_cache,
            num_loops=loops,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        assert outputs.loop_states is not None
        states = outputs.loop_states[:, :, keep]
        gates = None if outputs.gate_logits is None else outputs.gate_logits[:, :, keep]
        record = None if cache is None else cache.record
        exits, logits = self.read_exits(rule, outputs, keep, verified)
        if outputs.past_key_values is not None and outputs.past_key_values.trace is not None:
            # one entry for a prompt, however many chunks it has
            outputs.past_key_values.trace[:] = [(exits.depths[:, -1], exits.met[:, -1], exits.diverged[:, -1])]
        if record is not None:
            assert cache is not None
            record.note_prompt(states[:, :, -1], cache.length - 1, PathReader(self.gate, rule.params(watch=True)))
            record.pending_logits = logits[:, -1]
        return LoopedCausalLMOutput(
            loss=None if labels is None else self.loss(outputs, labels, **kwargs),
            logits=logits,
            **named_cache(outputs.past_key_values),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            exit_depths=exits.depths,
            exit_met=exits.met,
            exit_diverged=exits.diverged,
            loop_states=states if output_loop_states else None,
            gate_logits=gates if output_loop_states else None,
            loop_logits=self.loop_logits(outputs, keep) if output_loop_states else None,
            injected=outputs.injected[:, keep] if output_loop_states and outputs.injected is not None else None,
        )

    def _decode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: DepthCache,
        config: ExitConfig,
    ) -> LoopedCausalLMOutput:
        if input_ids is None:
            raise ValueError("a single token after a filled cache needs input_ids; embeddings are for prompts only")
        batch = input_ids.shape[0]
        seen = cache.join_mask(attention_mask, batch, 1)
        if position_ids is None:
            position_ids = positions(seen, cache.length, input_ids)
        last = position_ids[:, -1].expand(batch).cpu().numpy()
        return self.decode_step(input_ids, last, cache, config)

    def run_prompt(self, logits_to_keep: int | Tensor, **inputs: Any) -> LoopedModelOutput:
        """Prefill: all loops for all positions, in chunks if only the last position is read, or a cache is coded.

        Args:
            logits_to_keep: As `forward` takes it.
            **inputs: For the base model, None where there is none.
        """
        cache, embeds = inputs["past_key_values"], inputs["inputs_embeds"]
        name = "input_ids" if embeds is None else "inputs_embeds"
        length = inputs[name].shape[1]
        mask, positions = inputs["attention_mask"], inputs["position_ids"]
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1
        recorded = inputs.get("output_hidden_states") or inputs.get("output_attentions")
        recorded = recorded or any(inputs.get(name) is not None for name in self.model_inputs)
        whole = cache is None or recorded or (mask is not None and mask.dim() != 2)
        segment = None if cache is None else cache.segment
        if segment is None:
            whole = whole or torch.is_grad_enabled() or length <= PROMPT_CHUNK or not last_only
        if whole:
            return self.base_model(**inputs)  # type: ignore[no-any-return]
        past, chunks = cache.length, []
        size = PROMPT_CHUNK if segment is None else segment
        first = size - (past % size if segment else 0)
        for start, stop in pairwise([0, *range(first, length, size), length]):
            part = {
                name: inputs[name][:, start:stop],
                "attention_mask": None if mask is None else mask[:, : past + stop],
                "position_ids": None if positions is None else positions[:, start:stop],
            }
            chunks.append(self.base_model(**{**inputs, **part}))
            if last_only:
                del chunks[:-1]
        return joined(chunks)

    def run_texts(self, input_ids: Tensor) -> LoopedModelOutput:
        """All loops of whole texts `[B, S]`, pads on the right, over K/V as `kv_config` stores them."""
        if not self.kv_config.is_coded:
            return self.base_model(input_ids=input_ids, use_cache=False)  # type: ignore[no-any-return]
        cache = self.new_cache()
        cache.open(self.num_loops, input_ids.shape[0])
        texts = {"input_ids": input_ids, "inputs_embeds": None, "attention_mask": None, "position_ids": None}
        return self.run_prompt(0, **texts, past_key_values=cache, use_cache=True, num_loops=self.num_loops)

    def needs_cache(self, rule: ExitRule) -> bool:
        """Whether a prefill under a rule is read over K/V, so that a cache is made for it."""
        return False

    def read_exits(
        self, rule: ExitRule, outputs: LoopedModelOutput, keep: slice | Tensor, at_full_depth: bool
    ) -> tuple[Selection, Tensor]:
        """Where each position of a prefill is read, and its logits there.

        Args:
            rule: When a token may stop.
            outputs: Of all loops.
            keep: The positions that are read.
            at_full_depth: Read every position at loop T, as `verify` does.

        Returns:
            The exits `[B, S']`, and logits `[B, S', V]`.
        """
        assert outputs.loop_states is not None
        states = outputs.loop_states[:, :, keep]
        gates = None if outputs.gate_logits is None else outputs.gate_logits[:, :, keep]
        start = None if outputs.start_states is None else outputs.start_states[:, keep]
        read = masked_reader(self.read_states, outputs.past_key_values)
        exits = select_exits(rule, states, gates, read, broadcaster(self), at_full_depth, start)
        return exits, read(exits.hidden)

    def loop_logits(self, outputs: LoopedModelOutput, keep: slice | Tensor) -> Tensor:
        """Logits of every loop, `[T, B, S', V]`, as a model of so many loops has them."""
        assert outputs.loop_states is not None
        return self.read_states(outputs.loop_states[:, :, keep])

    def read_states(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., V]` of states `[..., D]`."""
        return self.lm_head(hidden_states)  # type: ignore[no-any-return]

    def loss(
        self, outputs: LoopedModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        """Cross-entropy at loop T, over labels `[B, S]` but those of -100."""
        logits = self.lm_head(outputs.last_hidden_state[:, :-1]).float()
        targets = labels[:, 1:].reshape(-1)  # [N]
        total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")
        return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
