"""Whom or what the sentence at a token is about: a hint for the first loop while the model learns to look up."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

from sigma0.bench.pocket.words import CITIES, NAMES, PLACES, THINGS

# What cross_entropy leaves out.
NONE = -100
_ENTITIES = {*NAMES, *THINGS, *PLACES, *CITIES}


def word_id(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """Id of a word as it stands inside a text, behind a space; a digit stands by itself."""
    token = tokenizer.convert_tokens_to_ids(word if word.isdigit() else f"\u0120{word}")
    if token is None:
        raise ValueError(f"{word!r} is not one token")
    return int(token)


@dataclass(frozen=True)
class _Vocabulary:
    """For each id: the word it stands for as an entity, else `NONE`; and whether a sentence ends there."""

    entity: tuple[int, ...]
    ends: tuple[bool, ...]


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> _Vocabulary:
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    entity = tuple(word_id(tokenizer, text.strip()) if text.strip() in _ENTITIES else NONE for text in texts)
    ends = tuple(text.strip() in (".", "?") or text.startswith("<|") or text.endswith("\n") for text in texts)
    return _Vocabulary(entity, ends)


def subjects(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[int]:
    """For each token the first person or thing of its sentence up to there, as an id; `NONE` before there is one."""
    vocabulary = _vocabulary(tokenizer)
    found = []
    now = NONE
    for token in ids:
        now = vocabulary.entity[token] if now == NONE else now
        found.append(now)
        now = NONE if vocabulary.ends[token] else now
    return found
