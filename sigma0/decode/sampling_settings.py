"""Sampling of every sequence as tensors, so that one pass serves any mixture of settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from sigma0.decode.random_numbers import key_of
from sigma0.decode.sampling_params import SamplingParams
from sigma0.decode.transfer import to_device

# Columns of the two tables.
TEMPERATURE, TOP_P_CUT, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
DRAWS, TOP_K, PROMPT, PADDING, MIN_LENGTH = range(5)
NO_ID = -1
# Nothing lies below it, so nothing is cut.
_NO_CUT = -1.0


@dataclass(frozen=True)
class SequenceSampling:
    """How the ids of one sequence are sampled; all of it as in transformers where nothing else is said.

    Attributes:
        draws: Ids are drawn; else the likeliest is taken, after whatever else is set here.
        seed: Seed of the draws.
        temperature: Above 0.
        top_k: 0 for none.
        top_p: In [0, 1]; None for none.
        min_p: In [0, 1].
        repetition_penalty: Above 0; 1 for none. Ids of the prompt count too.
        presence_penalty: As `SamplingParams` has it.
        frequency_penalty: As `SamplingParams` has it.
        prompt: Ids of the prompt, pads included, which do not count for these two.
        padding: First ids, which do not count for the repetition penalty.
        min_length: Number of ids, prompt and pads included, before which no end comes.
        eos: Ids that are an end.
        bad_words: Runs of ids that are never completed.
        logit_bias: Ids, each once, and what is added to their logits, ahead of all else.

    Raises:
        ValueError: For a value that transformers refuses.
    """

    draws: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: int = 0
    padding: int = 0
    min_length: int = 0
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", self.temperature > 0, "above 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", self.top_p is None or 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("bad_words", all(word and min(word) >= 0 for word in self.bad_words), "runs of ids, none empty"),
            ("logit_bias", _are_biases(self.logit_bias), "ids, each once, with finite numbers"),
        ):
            if not holds:
                raise ValueError(f"{name} has to be {wanted}, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, params: SamplingParams, seed: int = 0, prompt: int = 0) -> "SequenceSampling":
        """Sampling of a request.

        Args:
            params: What it asks for; of what concerns draws alone nothing is used at temperature 0.
            seed: Seed of the draws, as `request_seed` derives it.
            prompt: Number of its prompt ids.

        Raises:
            ValueError: For a value that transformers refuses.
        """
        penalties = {
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "prompt": prompt,
            "logit_bias": params.logit_bias,
        }
        if params.temperature == 0.0:
            return cls(**penalties)  # type: ignore[arg-type]
        return cls(
            draws=True,
            seed=seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=None if params.top_p == 1.0 else params.top_p,
            min_p=params.min_p,
            **penalties,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class SamplingProgram:
    """What sampling has to compute: the union over the sequences that are set. Everything else costs nothing.

    Attributes:
        draws: Some sequence draws its ids.
        output_penalties: Some sequence has a presence or frequency penalty.
        repetition: Some sequence has a repetition penalty.
        bad_words: Some sequence has bad words.
        bias: Some sequence has a bias of logits.
        min_length: Some sequence has a minimal length.
        temperature: Some sequence has a temperature other than 1.
        top_k: Bound on the sequences' top_k, a power of two; 0 where none has one.
        top_p: Some sequence has one.
        min_p: Some sequence has one.
    """

    draws: bool = False
    output_penalties: bool = False
    repetition: bool = False
    bad_words: bool = False
    bias: bool = False
    min_length: bool = False
    temperature: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False

    @property
    def reads_ids(self) -> bool:
        """Whether scores depend on which ids there are so far."""
        return self.output_penalties or self.repetition or self.bad_words

    @property
    def is_greedy(self) -> bool:
        """Whether every id is the argmax of the logits themselves."""
        return self == SamplingProgram()


class SamplingSettings:
    """Sampling of S sequences.

    Every tensor has one row more, which belongs to nobody and is greedy.

    Args:
        sequences: S.
        device: Where the logits are.

    Attributes:
        numbers: TEMPERATURE, TOP_P_CUT (cumulated probability up to which ids go), MIN_P, REPETITION, PRESENCE and
            FREQUENCY, float32 `[S + 1, 6]`.
        table: DRAWS, TOP_K, PROMPT, PADDING and MIN_LENGTH, int64 `[S + 1, 5]`.
        keys: Keys of the random numbers, int64 `[S + 1, 2]`.
        eos: Ids that are no end before MIN_LENGTH, `NO_ID` where there are fewer, int64 `[S + 1, E]`.
        words: Bad words: what must come before, `NO_ID` for anything, then the id that must not follow, `NO_ID` where
            there are fewer, int64 `[S + 1, W, P + 1]`.
        word_lengths: How many ids must come before, int64 `[S + 1, W]`.
        biased: Ids whose logits are biased, `NO_ID` where there are fewer, int64 `[S + 1, A]`.
        biases: What is added to them, float32 `[S + 1, A]`.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        rows = sequences + 1
        # never inference tensors: what was begun under torch.inference_mode may go on outside of it
        with torch.inference_mode(False):
            self.numbers = torch.tensor(_numbers(SequenceSampling()), device=device).repeat(rows, 1)
            self.table = torch.zeros((rows, 5), dtype=torch.int64, device=device)
            self.keys = torch.zeros((rows, 2), dtype=torch.int64, device=device)
            self.eos = torch.full((rows, 1), NO_ID, dtype=torch.int64, device=device)
            self.words = torch.full((rows, 1, 1), NO_ID, dtype=torch.int64, device=device)
            self.word_lengths = torch.zeros((rows, 1), dtype=torch.int64, device=device)
            self.biased = torch.full((rows, 1), NO_ID, dtype=torch.int64, device=device)
            self.biases = torch.zeros((rows, 1), dtype=torch.float32, device=device)
        self._set: list[SequenceSampling | None] = [None] * sequences

    def set(self, first: int, *wanted: SequenceSampling) -> None:
        """Sets how the ids of a sequence are sampled, or of several that follow each other.

        Args:
            first: The sequence, or the first of them.
            *wanted: One for each.
        """
        rows = slice(first, first + len(wanted))
        self._forget(rows)
        lines = [[each.draws, each.top_k, each.prompt, each.padding, each.min_length] for each in wanted]
        self.numbers[rows] = self._moved(np.array([_numbers(each) for each in wanted], dtype=np.float32))
        self.table[rows] = self._moved(np.array(lines, dtype=np.int64))
        self.keys[rows] = self._moved(np.array([key_of(each.seed) for each in wanted]))
        self._make_room(wanted)
        if any(each.eos for each in wanted):
            width = self.eos.shape[1]
            self.eos[rows] = self._moved(np.array([_padded(each.eos, width) for each in wanted]))
        if any(each.bad_words for each in wanted):
            words = np.full((len(wanted), *self.words.shape[1:]), NO_ID)  # [N, W, P + 1]
            lengths = np.zeros(words.shape[:2], dtype=np.int64)
            for row, each in enumerate(wanted):
                for number, word in enumerate(each.bad_words):
                    words[row, number, -len(word) :] = word
                    lengths[row, number] = len(word) - 1
            self.words[rows], self.word_lengths[rows] = self._moved(words), self._moved(lengths)
        if any(each.logit_bias for each in wanted):
            biased = np.full((len(wanted), self.biased.shape[1]), NO_ID)  # [N, A]
            biases = np.zeros(biased.shape, dtype=np.float32)
            for row, each in enumerate(wanted):
                for number, (token_id, bias) in enumerate(each.logit_bias):
                    biased[row, number], biases[row, number] = token_id, bias
            self.biased[rows], self.biases[rows] = self._moved(biased), self._moved(biases)
        self._set[rows] = wanted

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        lists = self.eos, self.words, self.word_lengths, self.biased, self.biases
        return self.numbers, self.table, self.keys, *lists

    def clear(self, sequence: int) -> None:
        """Forgets a sequence, which is greedy from now on."""
        self._forget(slice(sequence, sequence + 1))
        self._set[sequence] = None

    def reset(self) -> None:
        """Forgets all sequences."""
        self._forget(slice(0, len(self._set)))
        self._set = [None] * len(self._set)

    def _forget(self, rows: slice) -> None:
        for values in self.tensors:
            values[rows] = values[-1]

    def program(self) -> SamplingProgram:
        """What sampling has to compute for the sequences that are set."""
        wanted = [each for each in self._set if each is not None]
        most = max((each.top_k for each in wanted), default=0)
        return SamplingProgram(
            draws=any(each.draws for each in wanted),
            output_penalties=any(each.presence_penalty or each.frequency_penalty for each in wanted),
            repetition=any(each.repetition_penalty != 1.0 for each in wanted),
            bad_words=any(each.bad_words for each in wanted),
            bias=any(each.logit_bias for each in wanted),
            min_length=any(each.min_length and each.eos for each in wanted),
            temperature=any(each.temperature != 1.0 for each in wanted),
            top_k=1 << (most - 1).bit_length() if most else 0,
            top_p=any(each.top_p is not None for each in wanted),
            min_p=any(each.min_p > 0 for each in wanted),
        )

    def _moved(self, values: npt.NDArray[Any]) -> Tensor:
        return to_device(values, self.table.device)

    def _make_room(self, wanted: Sequence[SequenceSampling]) -> None:
        """Widens the lists of ids where a sequence brings more than any before."""
        words = [word for each in wanted for word in each.bad_words]
        more_eos = max(0, max(len(each.eos) for each in wanted) - self.eos.shape[1])
        more_words = max(0, max(len(each.bad_words) for each in wanted) - self.words.shape[1])
        more_biases = max(0, max(len(each.logit_bias) for each in wanted) - self.biased.shape[1])
        longer = max(0, max(map(len, words), default=0) - self.words.shape[2])
        with torch.inference_mode(False):
            if more_eos:
                self.eos = pad(self.eos, (0, more_eos), value=NO_ID)
            if more_words or longer:
                self.words = pad(self.words, (longer, 0, 0, more_words), value=NO_ID)
                self.word_lengths = pad(self.word_lengths, (0, more_words))
            if more_biases:
                self.biased = pad(self.biased, (0, more_biases), value=NO_ID)
                self.biases = pad(self.biases, (0, more_biases))


def _are_biases(biases: Sequence[tuple[int, float]]) -> bool:
    ids = {token_id for token_id, _ in biases}
    return len(ids) == len(biases) and all(token_id >= 0 and math.isfinite(bias) for token_id, bias in biases)


def _padded(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[NO_ID] * (width - len(ids))]


def _numbers(wanted: SequenceSampling) -> list[float]:
    """A line of `numbers`; rounded to float32 as transformers' scalars are where they meet scores."""
    values = {
        TEMPERATURE: wanted.temperature,
        TOP_P_CUT: _NO_CUT if wanted.top_p is None else 1 - wanted.top_p,
        MIN_P: wanted.min_p,
        REPETITION: wanted.repetition_penalty,
        PRESENCE: wanted.presence_penalty,
        FREQUENCY: wanted.frequency_penalty,
    }
    return [values[column] for column in range(len(values))]
