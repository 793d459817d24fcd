"""From logits to token ids: logits processors, greedy or random sampling, and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; as in transformers, and the two penalties as in OpenAI's protocol.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1].
        top_k: 0 for none.
        min_p: In [0, 1].
        repetition_penalty: Above 0; 1 for none.
        presence_penalty: Subtracted from the logits of ids that occur in the output.
        frequency_penalty: Subtracted from the logits of ids for each occurrence in the output.
        seed: Seed of the random draws; None draws one.
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
    """An id and its log-probability.

    Attributes:
        id: The id.
        logprob: Natural logarithm of its probability, before temperature, penalties and cuts.
    """

    id: int
    logprob: float


class OutputPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's penalties: logits of an id that occurs c times in the output lose `frequency * c`, `presence` if c > 0.

    Args:
        prompt: Number of prompt ids, which do not count.
        presence: Subtracted once.
        frequency: Subtracted for each occurrence.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt = prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` of the token after ids `[B, S]`."""
        counts = torch.zeros_like(scores)
        output_ids = input_ids[:, self._prompt :]
        counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors_for(params: SamplingParams, prompt: int = 0, draws: bool | None = None) -> LogitsProcessorList:
    """Logits processors in the order of transformers; those that would change nothing are left out.

    Args:
        params: Sampling of the request.
        prompt: Number of prompt ids, for the presence and frequency penalties.
        draws: Whether ids are drawn; by default unless the temperature is 0.

    Raises:
        ValueError: For a value that transformers refuses.
    """
    processors = LogitsProcessorList()
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OutputPenalty(prompt, params.presence_penalty, params.frequency_penalty))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not (params.temperature != 0.0 if draws is None else draws):
        return processors
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


def generator_for(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """Random generator of a request, seeded as in `sigma0.generate`; None where sampling is greedy."""
    if params.temperature == 0.0:
        return None
    source = torch.Generator()
    if params.seed is None:
        source.seed()
    else:
        source.manual_seed(params.seed)
    return torch.Generator(device=device).manual_seed(int(torch.randint(0, 2**63 - 1, (1,), generator=source)))


def logprobs_of(logits: Tensor, token_id: int, count: int) -> tuple[float, tuple[Alternative, ...]]:
    """Log-probability of a token, and the ids of highest probability.

    Args:
        logits: `[V]`, unprocessed.
        token_id: The sampled token.
        count: Number of alternatives.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = logprobs.topk(min(count, len(logprobs)))
    alternatives = (
        Alternative(index, value) for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    return float(logprobs[token_id]), tuple(alternatives)


class Sampler:
    """Samples one token at a time for the sequences of a batch.

    Args:
        generators: One for each sequence, which several samplers may share; None samples greedily.
        temperature: As in transformers.
        top_k: As in transformers; 0 for none.
        top_p: As in transformers.
        min_p: As in transformers.
        repetition_penalty: As in transformers, also for greedy sampling.

    Raises:
        ValueError: For a value that transformers refuses.
    """

    def __init__(
        self,
        generators: list[torch.Generator] | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> None:
        params = SamplingParams(temperature, top_p, top_k, min_p, repetition_penalty)
        self._processors = processors_for(params, draws=generators is not None)
        self._generators = generators

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits."""
        return self._generators is None and not self._processors

    def sample(self, ids: Tensor, logits: Tensor, sequence: int) -> int:
        """The next token of one sequence.

        Args:
            ids: Its ids so far, pads left out, `[S]`, on the CPU.
            logits: `[V]`.
            sequence: Batch index.
        """
        scores = logits.detach().float().cpu()[None]  # [1, V]
        scores = self._processors(ids[None], scores.clone()) if self._processors else scores
        if self._generators is None or scores.isnan().any():
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generators[sequence]))


# Settings of a generation config that a sampler has, those of them that matter for draws alone, and those it has not.
_SUPPORTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_FOR_DRAWS = ("temperature", "top_k", "top_p", "min_p")
_UNSUPPORTED = {
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_length": 0,
    "min_new_tokens": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "num_beams": 1,
}


def samplers_for(
    models: Sequence[PreTrainedModel], batch: int, do_sample: bool = False, seed: int | None = None, **settings: Any
) -> list[Sampler]:
    """A sampler for each model: the given settings, and for the others those of its generation config.

    Args:
        models: One for each rung.
        batch: B.
        do_sample: Draw tokens; else sampling is greedy.
        seed: Seed of the draws; None draws one.
        **settings: As `Sampler` takes them.

    Raises:
        ValueError: Where a generation config asks for something that single tokens on a ladder cannot have.
        TypeError: For an unknown argument.
    """
    generators = None
    if do_sample:
        first = int(torch.randint(0, 2**31, (1,))) if seed is None else seed
        generators = [torch.Generator().manual_seed(first + row) for row in range(batch)]
    samplers = []
    for model in models:
        config = model.generation_config
        for name, none in _UNSUPPORTED.items():
            value = getattr(config, name, none)
            if value not in (none, None):
                raise ValueError(
                    f"{type(model).__name__}'s generation config sets {name}={value!r}, which tokens on a ladder "
                    "do not have: unset it, or use unit='answer'"
                )
        names = [name for name in _SUPPORTED if do_sample or name not in _FOR_DRAWS]
        defaults = {name: getattr(config, name, None) for name in names}
        defaults = {name: value for name, value in defaults.items() if value is not None}
        samplers.append(Sampler(generators, **{**defaults, **settings}))
    return samplers
