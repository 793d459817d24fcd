"""From logits to ids: greedy, or drawn with a generator for each sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Chooser:
    """Chooses one id for every sequence.

    Args:
        generators: Of the draws, one for each sequence, which several choosers may share; None takes the likeliest.
        temperature: Of drawing.
        top_k: As transformers has it; 0 for none.
        top_p: As transformers has it.
        min_p: As transformers has it.
        repetition_penalty: As transformers has it, also without drawing.

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
        self._processors = LogitsProcessorList()
        if repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
        self._generators = generators
        if generators is None:
            return
        if temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            self._processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self._processors.append(TopPLogitsWarper(top_p))
        if min_p > 0.0:
            self._processors.append(MinPLogitsWarper(min_p))

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether nothing but the logits has a say."""
        return self._generators is None and not self._processors

    def choose(self, ids: Tensor, logits: Tensor, sequence: int) -> int:
        """The next id of one sequence.

        Args:
            ids: Its ids so far, pads left out, `[S]`, on the CPU.
            logits: `[V]`.
            sequence: Batch index.
        """
        scores = logits.detach().float().cpu()[None]  # [1, V]
        scores = self._processors(ids[None], scores.clone()) if self._processors else scores
        if self._generators is None or scores.isnan().any():
            return int(scores.argmax(-1))
        drawn = torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generators[sequence])
        return int(drawn)


# What a generation config may ask for that a chooser does, and what it does not.
_TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_REFUSED = {
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


def choosers_for(
    models: Sequence[Any], batch: int, do_sample: bool = False, seed: int | None = None, **asked: Any
) -> list[Chooser]:
    """A chooser for each model: what is asked for over what its generation config says.

    Args:
        models: One for each rung.
        batch: B.
        do_sample: Draw; else the likeliest is taken.
        seed: Of the draws; None draws one.
        **asked: Of `Chooser`.

    Raises:
        ValueError: Where a generation config asks for something that single tokens on a ladder cannot have.
        TypeError: For an unknown argument.
    """
    generators = None
    if do_sample:
        first = int(torch.randint(0, 2**31, (1,))) if seed is None else seed
        generators = [torch.Generator().manual_seed(first + row) for row in range(batch)]
    found = []
    for model in models:
        config = model.generation_config
        for name, none in _REFUSED.items():
            value = getattr(config, name, none)
            if value not in (none, None):
                raise ValueError(
                    f"{type(model).__name__}'s generation config sets {name}={value!r}, which tokens on a ladder "
                    "do not have: unset it, or use unit='answer'"
                )
        told = {name: getattr(config, name, None) for name in _TAKEN if do_sample or name not in _SAMPLING}
        own = {name: value for name, value in told.items() if value is not None}
        found.append(Chooser(generators, **{**own, **asked}))
    return found
