"""transformers' logits processors, turned into the settings of `decode.sampler`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processors

from sigma0.decode.sampling_settings import SequenceSampling


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties: logits of an id that occurs c times in the output lose `frequency * c`, `presence` if c > 0.

    Args:
        prompt: Number of prompt ids, which do not count.
        presence: Subtracted once.
        frequency: Subtracted for each occurrence.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt = prompt
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` of the token after ids `[B, S]`."""
        counts = torch.zeros_like(scores)
        output_ids = input_ids[:, self.prompt :]
        counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


# In the order in which `decode.sampler.process` applies them, which is transformers' own.
_ORDER: tuple[type, ...] = (
    processors.SequenceBiasLogitsProcessor,
    OutputPenalty,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
)


def sampling_of(
    logits_processor: LogitsProcessorList, batch: int, seeds: Sequence[int] | None = None, vocabulary: int | None = None
) -> list[SequenceSampling] | None:
    """What a prepared list of processors does, as settings of each sequence.

    Args:
        logits_processor: As transformers prepared it for the whole batch.
        batch: B.
        seeds: Seeds of the draws, one for each sequence; None samples greedily.
        vocabulary: V of the head, where it is known.

    Returns:
        One for each sequence. None where settings cannot say the same: for another processor or a subclass of a known
        one, which may do anything, for another order than transformers', for other `filter_value` or
        `min_tokens_to_keep` than its defaults, and for what transformers itself refuses at the first call.
    """
    types = [type(item) for item in logits_processor]
    if types != sorted(set(types) & set(_ORDER), key=_ORDER.index):
        return None
    shared: dict[str, Any] = {}
    paddings: Sequence[int] = [0] * batch
    for item in logits_processor:
        if isinstance(item, processors.RepetitionPenaltyLogitsProcessor):
            found = _paddings(item.prompt_ignore_length, batch)
            if found is None:
                return None
            paddings, told = found, {"repetition_penalty": item.penalty}
        else:
            read = _settings_of(item, vocabulary)
            if read is None:
                return None
            told = read
        if "eos" in told and "eos" in shared:
            if told["eos"] != shared["eos"]:
                return None
            told["min_length"] = max(told["min_length"], shared["min_length"])
        shared.update(told)
    return [
        SequenceSampling(draws=seeds is not None, seed=0 if seeds is None else seeds[row], padding=padding, **shared)
        for row, padding in enumerate(paddings)
    ]


def _paddings(ignored: Tensor | int | None, batch: int) -> Sequence[int] | None:
    """First ids of each sequence that a repetition penalty leaves out; None for another number of sequences."""
    if isinstance(ignored, Tensor):
        return ignored.tolist() if len(ignored) == batch else None
    return [ignored or 0] * batch


def _settings_of(item: LogitsProcessor, vocabulary: int | None) -> dict[str, Any] | None:
    """What one processor does to every sequence alike."""
    match item:
        case OutputPenalty():
            return {
                "presence_penalty": item.presence, "frequency_penalty": item.frequency, "prompt": item.prompt,
            }  # fmt: skip
        case processors.SequenceBiasLogitsProcessor() if type(item) is processors.SequenceBiasLogitsProcessor:
            single = all(len(ids) == 1 for ids in item.sequence_bias)
            biases = tuple((int(ids[0]), float(bias)) for ids, bias in item.sequence_bias.items())
            known = vocabulary is None or all(token_id < vocabulary for token_id, _ in biases)
            finite = all(math.isfinite(bias) for _, bias in biases)
            return {"logit_bias": biases} if single and known and finite else None
        case processors.NoBadWordsLogitsProcessor():
            words = tuple(tuple(map(int, word)) for word in item.sequence_bias)
            known = vocabulary is None or all(max(word) < vocabulary for word in words)
            return {"bad_words": words} if known else None
        case processors.MinLengthLogitsProcessor():
            return {"min_length": item.min_length, "eos": tuple(item.eos_token_id.tolist())}
        case processors.MinNewTokensLengthLogitsProcessor():
            length = item.prompt_length_to_skip + item.min_new_tokens
            return {"min_length": length, "eos": tuple(item.eos_token_id.tolist())}
        case processors.TemperatureLogitsWarper():
            return {"temperature": item.temperature}
    if item.filter_value != -math.inf or item.min_tokens_to_keep != 1:
        return None
    match item:
        case processors.TopKLogitsWarper():
            return {"top_k": item.top_k}
        case processors.TopPLogitsWarper():
            return {"top_p": item.top_p}
    return {"min_p": item.min_p}
