# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Gumbel noise without a state: each number is a hash of what it is for (`decode.sampling`), in integers.

Torch and Triton compute the same bits; the logarithms that follow may differ in the last ones.
"""

import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF
# Odd factors that spread ids, positions and purposes over 32 bits. No two (position, purpose) of a sequence share a
# counter before position 2^21, for up to 1024 purposes.
_ID, _POSITION, PURPOSE = 0x9E37_79B1, 0x9E37_79B1, 0x85EB_CA6B
# Factors of the mixing steps (C. Wellons, "Prospecting for Hash Functions"), below 2^31: a product of a word with one
# of them fits into an int64, so that nothing overflows.
_FIRST, _SECOND = 0x21F0_AAAD, 0x735A_2D97
# Takes the words into (0, 1), where float32 rounds the largest up.
_TO_UNIT = 2.0**-32 * (1 - 2.0**-23)


def gumbel(keys: Tensor, positions: Tensor, purpose: Tensor | int, vocabulary: int) -> Tensor:
    """Gumbel noise, float32 `[K, V]`: the argmax of scores plus it is a draw from their softmax.

    The number of an id does not depend on V.

    Args:
        keys: `key_of` each sequence's seed, int64 `[K, 2]`.
        positions: Position of the token that each is for, int64 `[K]`.
        purpose: What each is for: int64 `[K]`, or one for all.
        vocabulary: V.
    """
    words = counter_words(keys, positions, purpose)  # [K, 2]
    ids = torch.arange(0, vocabulary * _ID, _ID, device=keys.device)  # [V]
    bits = combined(ids + words[:, :1] & _WORD, words[:, 1:])  # [K, V]
    # -log of a uniform number near 1 decides who wins; log1p keeps all 32 bits there, and neither end is reached
    below_one = (bits.to(torch.float32) + 0.5) * _TO_UNIT
    return torch.log1p(below_one.neg_()).neg_().log_().neg_()


def counter_words(keys: Tensor, positions: Tensor, purpose: Tensor | int) -> Tensor:
    """Two words for each (seed, position, purpose), `[K, 2]`; arguments as `gumbel` takes them."""
    counter = positions * _POSITION + purpose * PURPOSE & _WORD
    words = keys + counter[:, None] & _WORD
    # keys are mixed well, and what is made of the words is mixed again
    return (words ^ words >> 16) * _FIRST & _WORD


def combined(first: Tensor, second: Tensor) -> Tensor:
    """One mixed word of two, which enter at different steps."""
    bits = (first ^ first >> 16) * _FIRST & _WORD
    bits = (bits ^ bits >> 15 ^ second) * _SECOND & _WORD
    return bits ^ bits >> 15
