"""Outputs of a looped model and of its `generate`: transformers' own with the depth of every token.

The cache is in `past_key_values` and in `cache`, which are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from sigma0.decode.runner import RunnerChoice
from sigma0.models.cache_name import CacheNamesMixin


@dataclass
class LoopedModelOutput(CacheNamesMixin, BaseModelOutputWithPast):  # type: ignore[misc]
    """A run of the shared block for all loops."""

    loop_states: Tensor | None = None  # Normed states h_1 ... h_T, `[T, B, S, D]`; `last_hidden_state` is h_T
    gate_logits: Tensor | None = None  # Gate at every loop, `[T, B, S]`
    injected: Tensor | None = None  # What every loop reads beside its state, `[B, S, D]`, where there is a prelude
    start_states: Tensor | None = None  # What loop 1 started from, `[B, S, D]`


def joined(chunks: Sequence[LoopedModelOutput]) -> LoopedModelOutput:
    """Runs over the chunks of a prompt as one: their positions side by side, and the last one's cache."""
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    for name in ("loop_states", "gate_logits", "injected", "start_states", "last_hidden_state"):
        parts = [getattr(chunk, name) for chunk in chunks]
        if parts[0] is not None:
            setattr(last, name, torch.cat(parts, dim=2 if name in ("loop_states", "gate_logits") else 1))
    return last


@dataclass
class LoopedCausalLMOutput(CacheNamesMixin, CausalLMOutputWithPast):  # type: ignore[misc]
    """A forward with the exit picked for each position; S' positions as `logits_to_keep` says.

    Attributes:
        exit_depths: Loop whose state `logits` reads, from 1, int64 `[B, S']`.
        exit_met: Whether the exit rule was met at that loop, bool `[B, S']`; under `verify`, which reads at loop T,
            whether it was met by then.
        exit_diverged: Whether the exit was forced because the loop diverged, bool `[B, S']`.
        loop_states: Every loop's normed state `[T, B, S', D]`, with `output_loop_states=True`.
        gate_logits: Every loop's gate logit `[T, B, S']`, with `output_loop_states=True`.
        loop_logits: Every loop's logits `[T, B, S', V]`, with `output_loop_states=True`.
        injected: What every loop reads beside its state, `[B, S', D]`, with `output_loop_states=True` and a prelude.
    """

    exit_depths: Tensor | None = None
    exit_met: Tensor | None = None
    exit_diverged: Tensor | None = None
    loop_states: Tensor | None = None
    gate_logits: Tensor | None = None
    loop_logits: Tensor | None = None
    injected: Tensor | None = None


@dataclass
class DepthGenerateOutput(CacheNamesMixin, GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate(..., return_dict_in_generate=True)` returns.

    Attributes:
        exit_depths: Loop at which each new token was read, from 1; 0 after a sequence ended. int64 `[B, new]`.
        exit_reasons: Why each new token stopped there, one list for each sequence, as long as the sequence. Of a token
            that was re-drafted under `verify`, why its first draft stopped. The first token of `verify` is read at
            loop T; its reason is the one that its exit rule would have given (`sigma0.decode.token_loop`).
        loop_passes: Calls of the shared block after the prefill.
        loop_rows: Rows in those calls.
        prompt_rows: Rows of the prefill; nothing is saved there.
        head_rows: Rows of the output head after the prefill.
        accepted: Under `verify`, whether each new token is an accepted draft or was read at loop T in the first place;
            False for replacements and after a sequence ended. bool `[B, new]`.
        tail_passes: Under `verify`, the passes after the exit of the last token, which check it.
        loop_statistics: With `output_statistics=True`, `decode.ops.STATISTICS` after each loop of the position that
            each new token is read from, float32 `[B, new, T, 8]`; NaN where no loop was run.
        loop_fates: With `output_statistics=True`, index into `decode.ops.FATES` of each loop, int8 `[B, new, T]`.
        readings: With `output_statistics=True`, the numbers named in `decode.ops.LOGIT_STATS` of each new token,
            float32 `[B, new, 8]`; NaN after a sequence ended.
        deepest_readings: With `output_statistics=True`, the numbers named in `decode.stats.DEEPEST`: what the head
            says of each new token after the last loop that `loop_statistics` tells of, float32 `[B, new, 4]`; NaN
            after a sequence ended, and throughout for a family with a coda and under tensor parallel.
        runner: What called the step, and why; None where transformers' own loop did.
    """

    exit_depths: Tensor | None = None
    exit_reasons: list[list[str]] | None = None
    loop_passes: int | None = None
    loop_rows: int | None = None
    prompt_rows: int | None = None
    head_rows: int | None = None
    accepted: Tensor | None = None
    tail_passes: int | None = None
    loop_statistics: Tensor | None = None
    loop_fates: Tensor | None = None
    readings: Tensor | None = None
    deepest_readings: Tensor | None = None
    runner: RunnerChoice | None = None
