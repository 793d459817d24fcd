"""Which ids are written: processors of one request, its draws, and the log-probabilities that it asks for."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How ids are chosen; as transformers has it, and the two penalties as OpenAI has them.

    Attributes:
        temperature: 0 takes the likeliest.
        top_p: In (0, 1].
        top_k: 0 for none.
        min_p: In [0, 1].
        repetition_penalty: Above 0; 1 for none.
        presence_penalty: Taken off the logits of ids that were written already.
        frequency_penalty: Likewise, for each time that they were.
        seed: Of the draws; None draws one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Alternative:
    """An id that could have been written.

    Attributes:
        id: Its id.
        logprob: Natural logarithm of its probability, before temperature, penalties and cuts.
    """

    id: int
    logprob: float


class WrittenPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties: logits of an id that was written c times lose `frequency * c`, and `presence` if c > 0.

    Args:
        prompt: Ids of the prompt, which do not count.
        presence: Taken off once.
        frequency: Taken off for each time.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt = prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` behind ids `[B, S]`."""
        counts = torch.zeros_like(scores)
        written = input_ids[:, self._prompt :]
        counts.scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors_for(sampling: Sampling, prompt: int) -> LogitsProcessorList:
    """Processors in the order that transformers has them; those that would change nothing are left out."""
    found = LogitsProcessorList()
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(WrittenPenalty(prompt, sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0.0:
        return found
    if sampling.temperature != 1.0:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def generator_for(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """The source of a request's draws; None where the likeliest is taken. The same as `sigma0.generate` has it."""
    if sampling.temperature == 0.0:
        return None
    source = torch.Generator()
    if sampling.seed is None:
        source.seed()
    else:
        source.manual_seed(sampling.seed)
    return torch.Generator(device=device).manual_seed(int(torch.randint(0, 2**63 - 1, (1,), generator=source)))


def logprobs_of(logits: Tensor, token_id: int, count: int) -> tuple[float, tuple[Alternative, ...]]:
    """Log-probability of a token, and the likeliest ids.

    Args:
        logits: `[V]`, as the model gave them.
        token_id: What was written.
        count: How many alternatives.
    """
    told = torch.log_softmax(logits.float(), dim=-1)
    best = told.topk(min(count, len(told)))
    alternatives = (
        Alternative(place, value) for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    return float(told[token_id]), tuple(alternatives)
