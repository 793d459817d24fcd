"""Samples the tokens of a ladder: each rung by its own settings, all rungs with the same random numbers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sigma0.decode.sampling import draw, process
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling

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


class TokenSampler:
    """Samples one token at a time for the sequences of a batch.

    Args:
        device: Where the logits are.
        batch: B.
        seeds: One for each sequence, which several samplers may share; None samples greedily.
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
        device: torch.device,
        batch: int,
        seeds: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> None:
        self._device = device
        self._settings = SamplingSettings(batch, device)
        wanted = [SequenceSampling(repetition_penalty=repetition_penalty)] * batch
        if seeds is not None:
            cut = None if top_p == 1.0 else top_p
            drawn = partial(SequenceSampling, True, temperature=temperature, top_k=top_k, top_p=cut, min_p=min_p)
            wanted = [drawn(seed=seed, repetition_penalty=repetition_penalty) for seed in seeds]
        self._settings.set(0, *wanted)
        self._program = self._settings.program()

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits."""
        return self._program.is_greedy

    @torch.no_grad()
    def sample(self, ids: Tensor, logits: Tensor, sequence: int) -> int:
        """The next token of one sequence.

        Args:
            ids: Its ids so far, pads left out, `[S]`, on the CPU.
            logits: `[V]`.
            sequence: Batch index.
        """
        rows = torch.tensor([sequence], device=self._device)
        lengths = torch.tensor([len(ids)], device=self._device)
        table = ids.to(self._device).expand(sequence + 1, -1) if self._program.reads_ids else None
        scores = process(self._settings, self._program, logits[None].to(self._device), rows, table, lengths)
        return int(draw(self._settings, self._program, scores, rows, lengths))


def samplers_for(
    models: Sequence[PreTrainedModel], batch: int, do_sample: bool = False, seed: int | None = None, **settings: Any
) -> list[TokenSampler]:
    """A sampler for each model: the given settings, and for the others those of its generation config.

    Args:
        models: One for each rung.
        batch: B.
        do_sample: Draw tokens; else sampling is greedy.
        seed: Seed of the draws; None draws one.
        **settings: As `TokenSampler` takes them.

    Raises:
        ValueError: Where a generation config asks for something that single tokens on a ladder cannot have.
        TypeError: For an unknown argument.
    """
    seeds = None
    if do_sample:
        first = int(torch.randint(0, 2**31, (1,))) if seed is None else seed
        seeds = [first + row for row in range(batch)]
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
        samplers.append(TokenSampler(model.device, batch, seeds, **{**defaults, **settings}))
    return samplers
