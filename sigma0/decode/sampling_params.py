"""What a sequence asks of sampling, by a request or by transformers' processors; that of all sequences as tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from sigma0.decode.transfer import to_device

# Columns of the two tables.
TEMPERATURE, TOP_P_CUT, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
DRAWS, TOP_K, PROMPT, PADDING, MIN_LENGTH = range(5)
NO_ID = -1
# Nothing lies below it, so nothing is cut.
_NO_CUT = -1.0
_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; as in transformers, and the two penalties as in OpenAI's protocol."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # In (0, 1]
    top_k: int = 0  # 0 for none
    min_p: float = 0.0  # In [0, 1]
    repetition_penalty: float = 1.0  # Above 0; 1 for none
    presence_penalty: float = 0.0  # Subtracted from the logits of ids that occur in the output
    frequency_penalty: float = 0.0  # Subtracted from the logits of ids for each occurrence in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # Ids, and what is added to the logit of each before anything else
    seed: int | None = None  # Seed of the random draws; None draws one


def check_logit_bias(biases: Mapping[int, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Biases of logits as `SamplingParams` has them.

    Args:
        biases: By id.
        vocabulary: V.

    Raises:
        ValueError: For an id that the head does not have, or a bias that is no finite number.
    """
    for token_id, bias in biases.items():
        if type(token_id) is not int or not 0 <= token_id < vocabulary:
            raise ValueError(f"logit_bias takes ids from 0 to {vocabulary - 1}, got {token_id!r:.40}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise ValueError(f"logit_bias takes finite numbers, got {bias!r:.40} for id {token_id}")
    return tuple((token_id, float(bias)) for token_id, bias in biases.items())


@dataclass(frozen=True)
class SequenceSampling:
    """How the ids of one sequence are sampled; all of it as in transformers and `SamplingParams`, unless said here.

    Attributes:
        draws: Ids are drawn; else the likeliest is taken, after whatever else is set here.
        temperature: Above 0.
        top_p: In [0, 1]; None for none.
        repetition_penalty: Above 0; 1 for none. Ids of the prompt count too.
        prompt: Ids of the prompt, pads included, which do not count for the other two penalties.
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
        biases = dict(self.logit_bias)
        are_biases = len(biases) == len(self.logit_bias) and min(biases, default=0) >= 0
        are_biases = are_biases and all(map(math.isfinite, biases.values()))
        for name, holds, wanted in (
            ("temperature", self.temperature > 0, "above 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", self.top_p is None or 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("bad_words", all(word and min(word) >= 0 for word in self.bad_words), "runs of ids, none empty"),
            ("logit_bias", are_biases, "ids, each once, with finite numbers"),
        ):
            if not holds:
                raise ValueError(f"{name} has to be {wanted}, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, params: SamplingParams, seed: int = 0, prompt: int = 0) -> "SequenceSampling":
        """Sampling of a request with so many prompt ids; its seed is one of `request_seed`.

        Of what concerns draws alone nothing is used at temperature 0.

        Raises:
            ValueError: For a value that transformers refuses.
        """
        left = {"seed", "temperature", "top_p", "top_k", "min_p"} if params.temperature == 0.0 else {"seed"}
        current = {name: value for name, value in vars(params).items() if name not in left} | {"prompt": prompt}
        if params.temperature == 0.0:
            return cls(**current)
        return cls(draws=True, seed=seed, **current | {"top_p": None if params.top_p == 1.0 else params.top_p})


@dataclass(frozen=True)
class SamplingProgram:
    """What sampling has to compute for a set of sequences; everything else costs nothing.

    Attributes say whether some sequence has what `SequenceSampling` calls so; `output_penalties` stands for two, and
    `top_k` is a bound on all, a power of two, 0 where none has one.
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

    @classmethod
    def of(cls, wanted: Sequence[SequenceSampling]) -> "SamplingProgram":
        """What some sequences take together."""
        most = max((entry.top_k for entry in wanted), default=0)
        return cls(
            draws=any(entry.draws for entry in wanted),
            output_penalties=any(entry.presence_penalty or entry.frequency_penalty for entry in wanted),
            repetition=any(entry.repetition_penalty != 1.0 for entry in wanted),
            bad_words=any(entry.bad_words for entry in wanted),
            bias=any(entry.logit_bias for entry in wanted),
            min_length=any(entry.min_length and entry.eos for entry in wanted),
            temperature=any(entry.temperature != 1.0 for entry in wanted),
            top_k=1 << (most - 1).bit_length() if most else 0,
            top_p=any(entry.top_p is not None for entry in wanted),
            min_p=any(entry.min_p > 0 for entry in wanted),
        )


class SamplingSettings:
    """Sampling of S sequences as tensors, so that one pass serves any mixture of them.

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
            self.biased = torch.full((rows, 1), NO_ID, dtype=torch.int64, device=device)
            self.biases = torch.zeros((rows, 1), dtype=torch.float32, device=device)
        self._set: list[SequenceSampling | None] = [None] * sequences

    def set(self, first: int, *wanted: SequenceSampling) -> None:
        """Sets how the ids of a sequence are sampled, or of several that follow each other from the first one on."""
        rows = slice(first, first + len(wanted))
        self._forget(rows)
        self.numbers[rows] = self._moved([_numbers(entry) for entry in wanted], np.float32)
        lines = [[entry.draws, entry.top_k, entry.prompt, entry.padding, entry.min_length] for entry in wanted]
        self.table[rows] = self._moved(lines, np.int64)
        self.keys[rows] = self._moved([key_of(entry.seed) for entry in wanted], np.int64)
        self.eos = self._listed(self.eos, rows, [entry.eos for entry in wanted])
        longest = max([self.words.shape[2], *(len(word) for entry in wanted for word in entry.bad_words)])
        self.words = _widened(self.words, 2, longest)
        words = [[[NO_ID] * (longest - len(word)) + list(word) for word in entry.bad_words] for entry in wanted]
        self.words = self._listed(self.words, rows, words)
        self.biased = self._listed(self.biased, rows, [[one for one, _ in entry.logit_bias] for entry in wanted])
        self.biases = self._listed(self.biases, rows, [[bias for _, bias in entry.logit_bias] for entry in wanted])
        self._set[rows] = wanted

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.numbers, self.table, self.keys, self.eos, self.words, self.biased, self.biases

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
        return SamplingProgram.of([entry for entry in self._set if entry is not None])

    def _moved(self, values: Sequence[Any], dtype: type) -> Tensor:
        return to_device(np.array(values, dtype=dtype), self.table.device)

    def _listed(self, kept: Tensor, rows: slice, lists: Sequence[Sequence[Any]]) -> Tensor:
        """The table `[S + 1, N, ...]` with a list in each of some rows, wider where one is longer than any before."""
        longest = max(map(len, lists))
        if longest:
            kept = _widened(kept, 1, longest)
            empty, dtype = (0, np.float32) if kept.is_floating_point() else (NO_ID, np.int64)
            values = np.full((len(lists), *kept.shape[1:]), empty, dtype=dtype)
            for row, entry in enumerate(lists):
                if entry:
                    values[row, : len(entry)] = entry
            kept[rows] = to_device(values, kept.device)
        return kept


def _widened(kept: Tensor, dim: int, width: int) -> Tensor:
    """A table with at least so many columns: lists grow at their ends, words ahead of their first ids."""
    size = list(kept.shape)
    size[dim] = width - size[dim]
    if size[dim] <= 0:
        return kept
    with torch.inference_mode(False):
        fresh = torch.full(size, 0 if kept.is_floating_point() else NO_ID, dtype=kept.dtype, device=kept.device)
        return torch.cat([kept, fresh] if dim == 1 else [fresh, kept], dim)


def _numbers(wanted: SequenceSampling) -> list[float]:
    """A line of `numbers`; rounded to float32 as transformers' scalars are where they meet scores."""
    cut = _NO_CUT if wanted.top_p is None else 1 - wanted.top_p
    penalties = wanted.repetition_penalty, wanted.presence_penalty, wanted.frequency_penalty
    return [wanted.temperature, cut, wanted.min_p, *penalties]


def request_seeds(batch: int) -> list[int]:
    """Seeds of B sequences that bring none, by a call of torch's global generator: `torch.manual_seed` decides them."""
    return torch.randint(0, 2**63 - 1, (batch,)).tolist()


def request_seed(seed: int | None) -> int:
    """Seed of a lone request: what `request_seeds(1)` says after `torch.manual_seed(seed)`; or now, for None."""
    if seed is None:
        return request_seeds(1)[0]
    return int(torch.randint(0, 2**63 - 1, (1,), generator=torch.Generator().manual_seed(seed)))


def key_of(seed: int) -> tuple[int, int]:
    """Two words that a seed is spread over, so that neighbouring seeds have nothing in common (SplitMix64)."""
    mixed = (seed + 0x9E37_79B9_7F4A_7C15) & _LONG
    mixed = (mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9 & _LONG
    mixed = (mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB & _LONG
    mixed ^= mixed >> 31
    return mixed >> 32, mixed & _WORD


def _biases_of(item: Any, vocabulary: float) -> dict[str, Any] | None:
    biases = tuple((ids, float(bias)) for ids, bias in item.sequence_bias.items())
    if any(len(ids) > 1 or ids[0] >= vocabulary or not math.isfinite(bias) for ids, bias in biases):
        return None
    return {"logit_bias": tuple((int(ids[0]), bias) for ids, bias in biases)}


def _words_of(item: Any, vocabulary: float) -> dict[str, Any] | None:
    words = tuple(tuple(map(int, word)) for word in item.sequence_bias)
    return {"bad_words": words} if all(max(word) < vocabulary for word in words) else None


def _no_end(item: Any, length: int) -> dict[str, Any]:
    return {"min_length": length, "eos": tuple(item.eos_token_id.tolist())}


def _cut(name: str) -> Callable[[Any, float], dict[str, Any] | None]:
    def read(item: Any, _: float) -> dict[str, Any] | None:
        plain = item.filter_value == -math.inf and item.min_tokens_to_keep == 1
        return {name: getattr(item, name)} if plain else None

    return read


# What each does to every sequence alike, given V, and None where settings cannot say it; in the order in which
# `decode.sampling.process` applies them, which is transformers' own.
_READERS: dict[type, Callable[[Any, float], dict[str, Any] | None]] = {
    processors.SequenceBiasLogitsProcessor: _biases_of,
    processors.RepetitionPenaltyLogitsProcessor: lambda item, _: {"repetition_penalty": item.penalty},
    processors.NoBadWordsLogitsProcessor: _words_of,
    processors.MinLengthLogitsProcessor: lambda item, _: _no_end(item, item.min_length),
    processors.MinNewTokensLengthLogitsProcessor: lambda item, _: _no_end(
        item, item.prompt_length_to_skip + item.min_new_tokens
    ),
    processors.TemperatureLogitsWarper: lambda item, _: {"temperature": item.temperature},
    processors.TopKLogitsWarper: _cut("top_k"),
    processors.TopPLogitsWarper: _cut("top_p"),
    processors.MinPLogitsWarper: _cut("min_p"),
}  # fmt: skip


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
    types, order = [type(item) for item in logits_processor], list(_READERS)
    if types != sorted(set(types) & set(order), key=order.index):
        return None
    shared: dict[str, Any] = {}
    paddings: Sequence[int] = [0] * batch
    for item in logits_processor:
        output = _READERS[type(item)](item, math.inf if vocabulary is None else vocabulary)
        if output is None:
            return None
        if "repetition_penalty" in output:
            ignored = item.prompt_ignore_length
            paddings = ignored.tolist() if isinstance(ignored, Tensor) else [ignored or 0] * batch
            if len(paddings) != batch:
                return None
        if "eos" in output and "eos" in shared:
            if output["eos"] != shared["eos"]:
                return None
            output["min_length"] = max(output["min_length"], shared["min_length"])
        shared.update(output)
    return [
        SequenceSampling(draws=seeds is not None, seed=0 if seeds is None else seeds[row], padding=padding, **shared)
        for row, padding in enumerate(paddings)
    ]
