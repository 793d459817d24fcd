"""From logits to ids: greedy, or drawn with a generator for each sequence."""

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
        batch: B.
        do_sample: Draw; else the likeliest is taken.
        seed: Of the draws; None draws one.
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
        batch: int,
        do_sample: bool = False,
        seed: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> None:
        self._processors = LogitsProcessorList()
        if repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
        self._generators: list[torch.Generator] | None = None
        if not do_sample:
            return
        if temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(temperature))
        if top_k:
            self._processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self._processors.append(TopPLogitsWarper(top_p))
        if min_p > 0.0:
            self._processors.append(MinPLogitsWarper(min_p))
        first = int(torch.randint(0, 2**31, (1,))) if seed is None else seed
        self._generators = [torch.Generator().manual_seed(first + row) for row in range(batch)]

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
        if self._generators is None:
            return int(scores.argmax(-1))
        drawn = torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generators[sequence])
        return int(drawn)
