"""The Hugging Face bridge: a generation mixin that runs each token to the depth that its exit rule picks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from sigma0.config import ExitConfig, KVConfig
from sigma0.decode.compiled import Progress, no_progress
from sigma0.decode.grammar.rows import start_masks
from sigma0.decode.grammar.vocabulary import grammars_of
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.lockstep import decode_tokens
from sigma0.decode.logits import check_logits
from sigma0.decode.ops import Backend, Operations, operations
from sigma0.decode.parallel import broadcaster, tp_group
from sigma0.decode.python_hooks import CheckedProcessors, rows_are_independent, split_criteria
from sigma0.decode.runners import RUNNERS, RunnerName
from sigma0.decode.stats import RunRecord, deepest_reader
from sigma0.decode.token_loop import Emission, Exits, TokenLoop
from sigma0.decode.transfer import Ints, PassCounts
from sigma0.models.cache_name import CACHE_NAME, given_cache, named_cache
from sigma0.models.hf_results import EndRecorder, lockstep_output, wave_output
from sigma0.models.kv_settings import kv_config_of
from sigma0.models.limits import check_cache, check_context, check_continued, check_ids, check_memory
from sigma0.models.outputs import DepthGenerateOutput, LoopedCausalLMOutput
from sigma0.models.stored_settings import STORED, StoredSettings

CONTINUOUS_BATCHING = (
    "transformers' continuous batching keeps one K/V plane for all loops, which is wrong for a looped model; use "
    "generate() on a padded batch"
)
_NO_PLANES = "has no planes for loops; leave it out, and a DepthCache is used"
# settings of generate that would do nothing here, or something else
REFUSED = {
    "cache_implementation": _NO_PLANES,
    "cache_config": _NO_PLANES,
    "token_healing": "would rewrite the end of the prompt by a call of its own; leave it out",
}


class DepthGenerationMixin(StoredSettings, GenerationMixin):  # type: ignore[misc]
    """Gives a looped model `generate` with native adaptive depth.

    The model implements `decode.model.LoopedModel` (`operations` comes from here), `num_loops`, and a `forward` that
    takes `exit_config`.

    Attributes:
        backend: "torch", "triton", or "auto": the kernels on CUDA, plain torch elsewhere.
        deterministic: Whether the kernels give a row the same bits whatever rows come along; False takes the products
            of torch's libraries.
        runner: What calls the step where a call does not say it: "eager", "compile", "cudagraph", or "auto": the last
            on CUDA, elsewhere eager.
        progress: Called with what is about to be compiled; the context that it returns lasts until it is.
        quantization: To what the block's weights were rounded as the model was loaded; None where they were not.
    """

    backend: Backend = "auto"
    deterministic: bool = True
    runner: RunnerName = "auto"
    progress: Progress = staticmethod(no_progress)
    quantization: str | None = None

    @property
    def num_block_layers(self) -> int:
        """L, layers in the shared block."""
        return int(self.config.num_hidden_layers)

    @property
    def stages(self) -> tuple[int, int]:
        """Layers of prelude and coda: none, unless a family has some."""
        return 0, 0

    @property
    def state_width(self) -> int:
        """D, width of a state."""
        return int(self.config.hidden_size)

    @property
    def operations(self) -> Operations:
        """Operations of a pass: plain torch or kernels.

        Raises:
            ValueError: If `backend` is unknown or cannot run on the model's device.
        """
        return replace(operations(self.backend, self.device, self.deterministic), broadcast=broadcaster(self))

    @property
    def kv_config(self) -> KVConfig:
        """How K/V are stored."""
        return kv_config_of(self)

    def new_cache(self, capacity: int = 0) -> DepthCache:
        """An empty cache for this model, with room for `capacity` tokens; 0 grows as needed."""
        return DepthCache(self.num_block_layers, self.num_loops, capacity, self.stages, self.kv_config)

    @torch.no_grad()
    def decode_step(
        self,
        input_ids: Tensor,
        positions: Ints,
        cache: DepthCache,
        exit_config: ExitConfig,
    ) -> LoopedCausalLMOutput:
        """One new token for every sequence, in lockstep: passes run until the deepest of them has stopped.

        Decoding is inference: there are no gradients.

        Args:
            input_ids: `[B, 1]`.
            positions: Position of the token in each sequence, `[B]`.
            cache: Planes and in-flight rows.
            exit_config: The exit rule.

        Returns:
            `logits` `[B, 1, V]` with `exit_depths`, `exit_met` and `exit_diverged` `[B, 1]`.

        Raises:
            ValueError: Under `verify`, which may reject a token and so needs its own loop.
        """
        if exit_config.after_exit == "verify":
            raise ValueError(
                "after_exit='verify' takes tokens back, which a forward of one token cannot: call generate or stream, "
                "or use after_exit='finish'"
            )
        logits, depths, met, diverged = decode_tokens(
            self, cache, self.exit_rule(exit_config), exit_config.after_exit == "drop", input_ids[:, 0], positions
        )
        check_logits(logits)
        if cache.trace is not None:
            cache.trace.append((depths, met, diverged))
        if cache.record is not None:
            cache.record.pending_logits = logits
        return LoopedCausalLMOutput(
            logits=logits[:, None],
            **named_cache(cache),
            exit_depths=depths[:, None],
            exit_met=met[:, None],
            exit_diverged=diverged[:, None],
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, which see, with `exit_config`, `output_statistics` and `runner`.

        Args:
            *args: For transformers.
            **kwargs: For transformers; a cache as `past_key_values` or as `cache`.

        Raises:
            TypeError: For a cache under both names.
        """
        cache = given_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        return super().generate(*args, **kwargs, **({} if cache is None else named_cache(cache)))

    # keeps its signature for whoever asks
    update_wrapper(generate, GenerationMixin.generate, assigned=())

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Takes `exit_config`, `output_statistics`, `runner` and `grammar` out of the keywords.

        transformers would drop them.
        """
        if kwargs.get("assistant_early_exit") is not None:
            raise ValueError(
                "assistant_early_exit cuts layers, not loops; use exit_config=ExitConfig(mode='fixed', ...)"
            )
        for name in ("fate_config", "door_policy", "confidence_model", "kv_config"):
            value = kwargs.get(name, getattr(generation_config, name, None))
            if value is not None and STORED[name].parse(value) != getattr(self, name):
                raise ValueError(
                    f"{name} belongs to the model, not to a call: set model.generation_config.{name} = {dict(value)!r}"
                    if isinstance(value, Mapping)
                    else f"{name} belongs to the model, not to a call: set model.generation_config.{name}"
                )
            kwargs.pop(name, None)
        requested = kwargs.pop("exit_config", None)
        if requested is None:
            requested = getattr(generation_config, "exit_config", None)
        resolved = self.resolve_exit_config(requested)
        wants_statistics = kwargs.pop("output_statistics", None)
        if wants_statistics is None:
            defaults = self.generation_config if generation_config is None else generation_config
            wants_statistics = getattr(defaults, "output_statistics", False)
        runner = kwargs.pop("runner", None) or self.runner
        if runner not in RUNNERS:
            raise ValueError(f"no such runner: {runner!r}; there are {', '.join(RUNNERS)}")
        grammar = kwargs.pop("grammar", None)
        for name, why in REFUSED.items():
            # looked at before transformers, which takes some of them out in silence
            sources = (kwargs.get(name), getattr(generation_config, name, None), getattr(self.generation_config, name))
            for value in sources:
                if value:
                    raise ValueError(CONTINUOUS_BATCHING if value == "paged" else f"{name}={value!r} {why}")
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        model_kwargs["exit_config"] = resolved
        prepared.output_statistics = bool(wants_statistics)
        prepared.runner = runner
        prepared.grammar = grammar
        return prepared, model_kwargs

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Checks the ids against the vocabulary before anything uses them."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        if name == "input_ids":
            check_ids(inputs, self.config.vocab_size)
            # new tokens are int64, and so are the ids with them
            inputs = inputs.long()
        return inputs, name, model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """A `DepthCache`, whatever `use_cache` says: skipping loops needs the planes."""
        generation_config.use_cache = True
        total = max_cache_length + 1
        if total > getattr(self.config, "max_position_embeddings", total):
            mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
            if mask is not None and mask.dim() == 2:
                # pads have no position
                check_context(self, int(mask.sum(-1).max()), total - mask.shape[1])
            else:
                width = total - 1 if positions is None else positions.shape[-1]
                check_context(self, width, total - width)
        cache = model_kwargs.get(CACHE_NAME)
        planes = model_kwargs["exit_config"].stops_at(self.num_loops) or self.num_loops
        check_memory(self, total, batch_size, planes, getattr(cache, "bytes_allocated", 0))
        if cache is None:
            cache = self.new_cache(max_cache_length)
            model_kwargs[CACHE_NAME] = cache
        else:
            check_cache(cache, self)
            cache._is_user_defined = True
            cache.reserve(max_cache_length)

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], *args: Any, **others: Any
    ) -> dict[str, Any]:
        """Keeps the tokenizer, which stop strings need, beside `open_token_loop` too."""
        tokenizer = kwargs.get("tokenizer")
        taken: dict[str, Any] = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **others)
        return taken if tokenizer is None else {**taken, "tokenizer": tokenizer}

    def prepare_inputs_for_generation(
        self, *args: Any, tokenizer: Any = None, assistant_tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        """Arguments of a forward, without the tokenizers that transformers hands on beside them."""
        return super().prepare_inputs_for_generation(*args, **kwargs)

    # transformers asks it for `inputs_embeds`
    update_wrapper(prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation, assigned=())

    def _prefill(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Marks the forward as a prefill, so that a prompt of a single token is not decoded."""
        model_kwargs = args[1] if len(args) > 1 else kwargs["model_kwargs"]
        cache = model_kwargs.get(CACHE_NAME)
        if (others := tp_group(self)) is not None:
            settings = vars(args[0] if args else kwargs["generation_config"])
            plain = {name: value for name, value in settings.items() if isinstance(value, int | float | str | list)}
            others.check_same_inputs(input_ids.tolist(), model_kwargs.get("exit_config"), plain)
        if cache is None:
            return super()._prefill(input_ids, *args, **kwargs)
        if cache.length:
            embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
            new = (input_ids if embeds is None else embeds).shape[1]
            given = args[0] if args else kwargs["generation_config"]
            check_continued(cache, new, getattr(given, "_mask_length", new) if mask is None else mask.shape[1])
        cache.prefilling = True
        try:
            return super()._prefill(input_ids, *args, **kwargs)
        finally:
            cache.prefilling = False

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """Checks what processors leave, and tells guidance, the one that runs the model itself, the exit settings."""
        prepared = CheckedProcessors(super()._get_logits_processor(*args, **kwargs))
        for item in prepared:
            if isinstance(item, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                item.model = partial(self.__call__, exit_config=kwargs["model_kwargs"]["exit_config"])
        return prepared

    def _get_candidate_generator(self, *, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """Drops our exit settings for the assistant model, which has its own or none."""
        others = {name: value for name, value in model_kwargs.items() if name != "exit_config"}
        return super()._get_candidate_generator(model_kwargs=others, **kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> DepthGenerateOutput | Tensor:
        """Greedy search and sampling: the wave decoder, or transformers' loop where rows depend on each other."""
        if generation_config.output_attentions or generation_config.output_hidden_states:
            raise ValueError(
                "generate gives no attentions or hidden states, since most loops are never run for all tokens at "
                "once; call model(sequences, output_loop_states=True) on the result"
            )
        verified = model_kwargs["exit_config"].after_exit == "verify"
        if verified and (synced_gpus or generation_config.is_assistant or (streamer and input_ids.shape[0] > 1)):
            raise ValueError(
                "after_exit='verify' cannot be used with synced_gpus, as an assistant, or with a streamer on a batch: "
                "its sequences advance at their own pace; use after_exit='finish'"
            )
        own_pace = input_ids.shape[0] == 1 or verified
        independent = rows_are_independent(logits_processor, stopping_criteria)
        if synced_gpus or generation_config.is_assistant or not (own_pace or (independent and streamer is None)):
            if getattr(generation_config, "grammar", None) is not None:
                raise ValueError(
                    "a grammar cannot be used with synced_gpus, as an assistant, or on a batch with a streamer or a "
                    "logits processor or stopping criterion of your own: generate the sequences one by one"
                )
            stepped: DepthGenerateOutput | Tensor = self._sample_in_lockstep(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
            return stepped
        loop, first = self.open_token_loop(
            input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        emitted: list[list[Emission]] = [[] for _ in range(input_ids.shape[0])]
        for emissions in loop.run(first):
            for emission in emissions:
                emitted[emission.sequence].append(emission)
                if streamer is not None:
                    streamer.put(torch.tensor([emission.token_id]))
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return wave_output(loop, emitted, model_kwargs["exit_config"].mode)
        return loop.sequences

    def open_token_loop(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> tuple[TokenLoop, Exits]:
        """Prefills the prompt and returns the token loop, for a caller that wants the new tokens one by one.

        `model.generate(..., custom_generate=type(model).open_token_loop)` calls it with all arguments prepared.

        Args:
            input_ids: `[B, P]`, left-padded.
            logits_processor: As transformers prepared them.
            stopping_criteria: As transformers prepared them.
            generation_config: As transformers prepared it.
            **model_kwargs: The cache, `exit_config`, `position_ids` and other arguments of the forward.

        Returns:
            The token loop after the prefill, and the exits of the last prompt tokens, where `TokenLoop.run` starts.
        """
        cache, exit_config = model_kwargs[CACHE_NAME], model_kwargs["exit_config"]
        cache.counts = PassCounts()
        grammars, wanted = None, getattr(generation_config, "grammar", None)
        if wanted is not None:
            _, longest, eos = split_criteria(stopping_criteria)
            size, limit = int(self.config.vocab_size), None if longest is None else longest - input_ids.shape[1]
            grammars = grammars_of(wanted, input_ids.shape[0], size, eos, limit)
            cache.start_masks = start_masks(grammars, size, self.device)
        try:
            with self._recording(input_ids, generation_config, cache) as record:
                outputs = self._prefill(input_ids, generation_config, model_kwargs)
        finally:
            cache.start_masks = None
        batch = input_ids.shape[0]
        first = Exits(
            outputs.exit_depths[:, -1].cpu().numpy(),
            outputs.exit_met[:, -1].cpu().numpy(),
            outputs.logits[:, -1],
            outputs.exit_diverged[:, -1].cpu().numpy(),
        )
        positions = (model_kwargs["position_ids"][:, -1] + 1).cpu().numpy()
        loop = TokenLoop(
            self,
            cache,
            self.exit_rule(exit_config),
            exit_config,
            input_ids,
            np.broadcast_to(positions, (batch,)),
            logits_processor,
            stopping_criteria,
            generation_config,
            record,
            grammars,
        )
        return loop, first

    @contextmanager
    def _recording(
        self, input_ids: Tensor, generation_config: GenerationConfig, cache: DepthCache
    ) -> Iterator[RunRecord | None]:
        """Attaches a record of statistics to the cache, with `output_statistics=True`."""
        record = None
        if getattr(generation_config, "output_statistics", False):
            new = max(1, generation_config.max_length - input_ids.shape[1])
            shape = input_ids.shape[0], new, self.num_loops
            record = RunRecord(*shape, self.device, self.operations, deepest_reader(self))
        cache.record = record
        try:
            yield record
        finally:
            cache.record = None

    def _sample_in_lockstep(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool,
        streamer: Any,
        **model_kwargs: Any,
    ) -> DepthGenerateOutput | Tensor:
        """Runs transformers' loop over our `forward`: exact too, but each sequence waits for the deepest one."""
        cache = model_kwargs[CACHE_NAME]
        trace: list[tuple[Tensor, Tensor, Tensor]] = []
        cache.counts, cache.trace = PassCounts(), trace
        recorder = EndRecorder(stopping_criteria, cache, self.operations)
        with self._recording(input_ids, generation_config, cache) as record:
            try:
                outputs = super()._sample(
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=recorder,
                    generation_config=generation_config,
                    synced_gpus=synced_gpus,
                    streamer=streamer,
                    **model_kwargs,
                )
            finally:
                cache.trace = cache.ended = None
        if not generation_config.return_dict_in_generate or generation_config.is_assistant:
            plain: Tensor = outputs
            return plain
        return lockstep_output(outputs, trace, recorder, model_kwargs["exit_config"].mode, record)

    def _beam_search(self, input_ids: Tensor, *args: Any, **model_kwargs: Any) -> Any:
        return super()._beam_search(input_ids, *args, **self._at_full_depth("beam search", model_kwargs, args))

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **model_kwargs: Any) -> Any:
        if model_kwargs[CACHE_NAME].length:
            raise ValueError("assisted generation needs an empty cache: leave it out")
        return super()._assisted_decoding(
            input_ids, *args, **self._at_full_depth("assisted generation", model_kwargs, args)
        )

    def _at_full_depth(self, what: str, model_kwargs: dict[str, Any], settings: tuple[Any, ...]) -> dict[str, Any]:
        """Settings of a mode that crops fed tokens from the cache, which is exact at full depth only."""
        if any(getattr(source, "output_statistics", False) for source in (*settings, *model_kwargs.values())):
            raise ValueError(f"{what} tells no statistics of its tokens: leave output_statistics out")
        if any(getattr(source, "grammar", None) is not None for source in (*settings, *model_kwargs.values())):
            raise ValueError(f"{what} follows no grammar: leave grammar out")
        if tp_group(self) is not None:
            raise ValueError(f"{what} cannot be agreed on by several processes: load the model without tensor_parallel")
        config: ExitConfig = model_kwargs["exit_config"]
        if config.mode != "full" and not (config.mode == "qexit" and config.q == 1.0):
            raise ValueError(
                f"{what} works at full depth only, not with exit mode '{config.mode}': pass "
                "exit_config=ExitConfig(mode='full')"
            )
        return {**model_kwargs, "exit_config": ExitConfig(mode="full")}

    @property
    def init_continuous_batching(self) -> Any:
        """Absent: transformers' paged cache would share one plane over all loops, which silently gives wrong text."""
        raise AttributeError(CONTINUOUS_BATCHING)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, see `init_continuous_batching`."""
        raise ValueError(CONTINUOUS_BATCHING)
