"""Ouro (arXiv 2510.25741): a block of layers applied T times to every token, with a gate after each loop.

Parameter names are those of the published checkpoints. Layers have a norm before and after attention and MLP; the
model's last norm runs after every loop, and the next loop starts from its output.
"""

from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from sigma0.config import ExitConfig
from sigma0.decode.catch_up import catch_up, enter_pending
from sigma0.decode.exits import exit_probabilities, select_exits
from sigma0.decode.finite import check_weights as check_finite
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import BatchRows
from sigma0.decode.ops import TORCH, LoopEndWeights, Operations, operations
from sigma0.decode.parallel import broadcaster, check_heads, tp_size
from sigma0.decode.stats import PathReader
from sigma0.models.fused_rows import can_fuse, run_fused
from sigma0.models.hf_generate import DepthGenerationMixin, check_cache
from sigma0.models.limits import check_ids
from sigma0.models.ouro_block import OuroAttention, OuroDecoderLayer, OuroRMSNorm, rms_norm
from sigma0.models.ouro_config import OuroConfig, repaired_tokens
from sigma0.models.outputs import LoopedCausalLMOutput, LoopedModelOutput
from sigma0.models.quantization import named_library, stored_method
from sigma0.models.rotary_table import RotaryTable
from sigma0.models.row_linear import Modules, PackedLinear, PackedWeightsMixin, Product, is_plain
from sigma0.models.stored import check_dtypes, check_generation_config, check_shapes, read_headers

# Tokens of a prompt that run through all loops together; bounds the memory of activations.
PROMPT_CHUNK = 1024
# Arguments that transformers and its tools pass to any model, beside the named ones.
FORWARD_KEYS = frozenset(TransformersKwargs.__optional_keys__) | {"return_dict", "token_type_ids", "use_kernels"}


class OuroPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Loading and saving for the family."""

    config_class = OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _can_record_outputs = {"hidden_states": OuroDecoderLayer, "attentions": OuroAttention}  # noqa: RUF012

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: `save_pretrained` would copy this package's source into the checkpoint."""

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, check_weights: bool = True, **kwargs: Any
    ) -> Any:
        """As transformers' own, but with safetensors only, and a missing or unexpected tensor is an error.

        Args:
            *args: For transformers.
            output_loading_info: For transformers.
            check_weights: Refuse weights that are NaN or infinite, for one pass over them.
            **kwargs: For transformers.

        Raises:
            ValueError: Naming the tensors that do not fit or are no numbers, or the field of the config.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors=False would unpickle the checkpoint; convert it to safetensors")
        kwargs["use_safetensors"] = True
        folder = _folder(*args, **kwargs)
        stored = stored_method(kwargs.get("config") or (folder and PreTrainedConfig.get_config_dict(folder)[0]))
        if folder is not None:
            _check_files(folder, None if kwargs.get("ignore_mismatched_sizes") else kwargs.get("config"), stored)
        checked = ["missing_keys", "unexpected_keys"]
        if not kwargs.get("ignore_mismatched_sizes"):
            # transformers' own error names no tensor, so it is suppressed and ours is raised
            checked.append("mismatched_keys")
            kwargs["ignore_mismatched_sizes"] = True
        with named_library(stored):
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = {name: sorted(map(str, info[name])) for name in checked if info.get(name)}
        if wrong:
            problems = "; ".join(
                f"{name.replace('_keys', '')}: {', '.join(tensors)}" for name, tensors in wrong.items()
            )
            raise ValueError(f"the checkpoint does not fit {cls.__name__}: {problems}")
        if check_weights:
            check_finite(model)
        return (model, info) if output_loading_info else model


def _folder(name: Any = None, *_: Any, subfolder: str = "", **__: Any) -> Path | None:
    """The folder given to `from_pretrained`; None for a hub id, whose files may not be downloaded yet."""
    folder = Path(name, subfolder) if isinstance(name, str | Path) else None
    return folder if folder is not None and folder.is_dir() else None


def _check_files(folder: Path, config: PreTrainedConfig | None, quantization: str | None) -> None:
    """Checks that the files of a folder fit together, before any memory is allocated."""
    tensors = read_headers(folder)
    check_dtypes(tensors, quantization is not None)
    if isinstance(config, OuroConfig):
        check_shapes(config, tensors)
    check_generation_config(folder)


class OuroModel(OuroPreTrainedModel):
    """Embeddings, the shared block, its norm and the exit gate."""

    _keys_to_ignore_on_load_unexpected = ["lm_head"]  # noqa: RUF012

    def __init__(self, config: OuroConfig) -> None:
        check_heads(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(OuroDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self._rotary_table = RotaryTable(self.rotary_emb)
        self.gradient_checkpointing = False
        self.post_init()

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
            **kwargs: For the attention function.

        Returns:
            The states after every loop.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, S, D]
        batch, length, _ = hidden_states.shape
        loops = self.config.total_ut_steps if num_loops is None else num_loops
        if past_key_values is not None:
            check_cache(past_key_values)
            if self.training and self.gradient_checkpointing:
                raise ValueError("gradient checkpointing runs layers without a cache: leave past_key_values out")
            if past_key_values.in_flight is not None:
                raise ValueError(
                    "tokens of this cache wait for their deeper loops: call the model with its head instead"
                )
        elif use_cache:
            past_key_values = DepthCache(len(self.layers), self.config.total_ut_steps)
        seen = attention_mask if attention_mask is None or attention_mask.dim() == 4 else attention_mask.bool()
        if past_key_values is not None:
            past_key_values.open(loops, batch)
            if seen is None or seen.dim() == 2:
                seen = past_key_values.join_mask(seen, batch, length)
        elif seen is not None and seen.dim() == 2 and tuple(seen.shape) != (batch, length):
            raise ValueError(f"attention_mask has shape {tuple(seen.shape)}, the input {(batch, length)}")
        if position_ids is None:
            position_ids = _positions(seen, 0 if past_key_values is None else past_key_values.length, hidden_states)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=seen,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        states, gates = [], []
        for loop in range(loops):
            for index, layer in enumerate(self.layers):
                hidden_states = layer(
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=mask,
                    past_key_values=past_key_values,
                    plane=loop * len(self.layers) + index,
                    **kwargs,
                )
            hidden_states = self.norm(hidden_states)
            states.append(hidden_states)
            gates.append(self.early_exit_gate(hidden_states).squeeze(-1))
        if past_key_values is not None:
            past_key_values.commit(length)
            past_key_values.counts.prompt_rows += loops * _real_tokens(seen, batch, length)
        return LoopedModelOutput(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values,
            loop_states=torch.stack(states),
            gate_logits=torch.stack(gates),
        )

    def run_rows(self, hidden_states: Tensor, rows: BatchRows) -> Tensor:
        """One loop of the layers over the rows of a pass, `[R, D]`, before the norm."""
        if rows.ops.project_rows is not None and can_fuse(self.layers, hidden_states):
            tables = self._rotary_table.reserve(rows.longest, hidden_states)
            return run_fused(self.layers, hidden_states, rows, *tables)
        positions = rows.positions(hidden_states.device)
        position_embeddings = self._rotary_table.rows(positions, rows.longest, hidden_states)
        for layer in self.layers:
            run = layer.forward if is_plain(layer) else layer
            hidden_states = run(hidden_states, position_embeddings=position_embeddings, rows=rows)
        return hidden_states


def _positions(seen: Tensor | None, past: int, hidden_states: Tensor) -> Tensor:
    length = hidden_states.shape[1]
    if seen is None or seen.dim() == 4:
        return torch.arange(past, past + length, device=hidden_states.device)[None]
    return (seen.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


def _real_tokens(seen: Tensor | None, batch: int, length: int) -> int:
    if seen is None or seen.dim() == 4:
        return batch * length
    return int(seen[:, -length:].sum())


class OuroForCausalLM(DepthGenerationMixin, PackedWeightsMixin, OuroPreTrainedModel):
    """Ouro with its output head; the logits of a position are read at the loop that the exit rule picks."""

    _multiply: Product = staticmethod(F.linear)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._head = PackedLinear("lm_head")
        self.num_block_layers = config.num_hidden_layers
        self.post_init()
        if config.vocab_size % tp_size(config) and not config.tie_word_embeddings:
            # transformers 5.17 gathers no shards of different sizes: every process then keeps the whole head
            del self._tp_plan["lm_head"]

    @property
    def num_loops(self) -> int:
        """T, loops at full depth."""
        return self.config.total_ut_steps  # type: ignore[no-any-return]

    def adjust_generation_fn(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        """Repairs the published special ids where transformers reads them for generation."""
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        settings = self.generation_config
        repaired = repaired_tokens(settings.bos_token_id, settings.eos_token_id, settings.pad_token_id)
        for name, value in (repaired or {}).items():
            setattr(settings, name, value)

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings `[R, D]` of ids `[R]`."""
        return self.model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def loop(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        """One loop over the rows of a pass, `[R, D]`, before the norm."""
        return self.model.run_rows(hidden, rows)

    def reserve_positions(self, longest: int, like: Tensor) -> Hashable:
        """Makes what passes over so many positions read beside parameters, for states of this device and dtype."""
        self.model._rotary_table.reserve(longest, like)
        self.pack_weights()
        self._multiply = self.operations.product(like.dtype)
        return (self._multiply, *(id(product.reordered) for product, _ in self.packed_weights()))

    def packed_weights(self) -> Iterator[tuple[PackedLinear, Modules]]:
        """The products of a pass over rows and of its reading, each with the modules that hold its layers."""
        for module in self.modules():
            if isinstance(module, OuroDecoderLayer):
                yield from module.packed_weights()
        yield self._head, self._modules

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after a loop, `[R, D]`."""
        ops = TORCH if torch.compiler.is_compiling() else self._operations_on(hidden.device)
        return rms_norm(self.model.norm, hidden, ops)

    def gate(self, hidden: Tensor) -> Tensor:
        """Gate logits `[R]`."""
        return self.model.early_exit_gate(hidden).squeeze(-1)  # type: ignore[no-any-return]

    def loop_end_weights(self) -> LoopEndWeights:
        """Weights of norm and gate."""
        norm, gate = self.model.norm, self.model.early_exit_gate
        return LoopEndWeights(norm.weight, norm.variance_epsilon, gate.weight[0], gate.bias)

    def read(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]`."""
        # programs are compiled behind `reserve_positions`
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
            labels: `[B, S]`, -100 ignored. The loss is sum over t of p_t CE_t (arXiv 2510.25741 section 3), where the
                published code takes the cross-entropy of the averaged logits.
            use_cache: Whether to make and return a `DepthCache`.
            logits_to_keep: Number of last positions with logits, 0 for all, or their indices.
            exit_config: The exit rule; by default the one of `resolve_exit_config(None)`.
            output_loop_states: Also return states, gate logits and logits of every loop; a single token after a
                cache is then a prefill.
            **kwargs: For the attention function, and `num_items_in_batch` for the loss.

        Raises:
            ValueError: For bad settings, a cache that is no `DepthCache`, or a mask whose shape does not fit.
            TypeError: For an unknown argument.
        """
        unknown = sorted(set(kwargs) - FORWARD_KEYS)
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
        cache = past_key_values
        if inputs_embeds is None:
            # looking at the ids waits for the GPU: once for a prompt is cheap, once for a token or training step is not
            check_ids(inputs, self.config.vocab_size, look=inputs.device.type == "cpu" or not (self.training or cache))
            # embeddings take no narrower integers
            inputs = input_ids = inputs.long()
        if cache is not None:
            check_cache(cache)
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
        outputs = self._run_prompt(
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
        assert outputs.gate_logits is not None
        states, gates = outputs.loop_states[:, :, keep], outputs.gate_logits[:, :, keep]
        record = None if cache is None else cache.record
        # statistics that the rule does not use can wait; with kernels they come with every pass anyway
        watch = record is not None and (self.operations.backend == "triton" or rule.params(watch=False).watches)
        exits = select_exits(rule, states, gates, self.lm_head, watch, broadcaster(self), verified)
        if outputs.past_key_values is not None and outputs.past_key_values.trace is not None:
            # one entry for a prompt, however many chunks it has
            outputs.past_key_values.trace[:] = [(exits.depths[:, -1], exits.met[:, -1], exits.diverged[:, -1])]
        logits = self.lm_head(exits.hidden)
        if record is not None:
            assert cache is not None
            if exits.statistics is not None and exits.fates is not None:
                record.put_prompt(exits.statistics[:, :, -1], exits.fates[:, :, -1], cache.length - 1)
            else:
                record.note_prompt(states[:, :, -1], cache.length - 1, PathReader(self.gate, rule.params(watch=True)))
            record.pending_logits = logits[:, -1]
        return LoopedCausalLMOutput(
            loss=None if labels is None else self._loop_loss(outputs, labels, **kwargs),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            exit_depths=exits.depths,
            exit_met=exits.met,
            exit_diverged=exits.diverged,
            loop_states=states if output_loop_states else None,
            gate_logits=gates if output_loop_states else None,
            loop_logits=self.lm_head(states) if output_loop_states else None,
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
            position_ids = _positions(seen, cache.length, input_ids)
        positions = position_ids[:, -1].expand(batch).cpu().numpy()
        return self.decode_step(input_ids, positions, cache, config)

    def _run_prompt(self, logits_to_keep: int | Tensor, **inputs: Any) -> LoopedModelOutput:
        """Prefill: all loops for all positions, in chunks if only the last position is read."""
        cache, embeds = inputs["past_key_values"], inputs["inputs_embeds"]
        name = "input_ids" if embeds is None else "inputs_embeds"
        length = inputs[name].shape[1]
        mask, positions = inputs["attention_mask"], inputs["position_ids"]
        last_only = isinstance(logits_to_keep, int) and logits_to_keep == 1
        recorded = inputs.get("output_hidden_states") or inputs.get("output_attentions")
        whole = cache is None or torch.is_grad_enabled() or length <= PROMPT_CHUNK or not last_only or recorded
        if whole or (mask is not None and mask.dim() != 2):
            return self.model(**inputs)  # type: ignore[no-any-return]
        past = cache.length
        for start in range(0, length, PROMPT_CHUNK):
            stop = min(start + PROMPT_CHUNK, length)
            part = {
                name: inputs[name][:, start:stop],
                "attention_mask": None if mask is None else mask[:, : past + stop],
                "position_ids": None if positions is None else positions[:, start:stop],
            }
            outputs = self.model(**{**inputs, **part})
        return outputs  # type: ignore[no-any-return]

    def _loop_loss(
        self, outputs: LoopedModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        assert outputs.loop_states is not None and outputs.gate_logits is not None
        targets = labels[:, 1:].reshape(-1)  # [N]
        probabilities = exit_probabilities(outputs.gate_logits[:, :, :-1])  # [T, B, S - 1]
        loss = torch.zeros((), dtype=torch.float32, device=targets.device)
        for states, weight in zip(outputs.loop_states, probabilities, strict=True):
            logits = self.lm_head(states[:, :-1]).float()
            losses = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="none")  # [N]
            loss = loss + (weight.reshape(-1) * losses).sum()
        return loss / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
