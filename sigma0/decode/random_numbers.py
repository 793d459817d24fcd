"""Random numbers without a state: each is a hash of what it is for, so nothing else can change it.

A number belongs to (seed of the sequence, position of the token, purpose, id), and is computed in integers on the
device. So a sequence draws the same tokens alone, in any batch, after a preemption and from any runner.
"""

import torch
from torch import Tensor

_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF
# What a number is for. A token is drawn once where it is read first; under `verify` each deeper loop may test it, and
# draw another in its place.
OWN_DRAW = 0
# Odd factors that spread ids, positions and purposes over 32 bits. No two (position, purpose) of a sequence share a
# counter before position 2^21, for up to 1024 purposes.
_ID, _POSITION, _PURPOSE = 0x9E37_79B1, 0x9E37_79B1, 0x85EB_CA6B
# Factors of the mixing steps (C. Wellons, "Prospecting for Hash Functions"), below 2^31: a product of a word with one
# of them fits into an int64, so that nothing overflows.
_FIRST, _SECOND = 0x21F0_AAAD, 0x735A_2D97
# Takes the words into (0, 1), where float32 rounds the largest up.
_TO_UNIT = 2.0**-32 * (1 - 2.0**-23)


def check_purpose(loop: Tensor) -> Tensor:
    """Purpose of the test of a draft at a loop, from 1."""
    return 2 * loop - 1


def redraw_purpose(loop: Tensor) -> Tensor:
    """Purpose of the draw in place of a draft that fails its test at a loop, from 1."""
    return 2 * loop


def request_seeds(batch: int) -> list[int]:
    """Seeds of sequences that bring none, from torch's global generator: `torch.manual_seed` decides them.

    Args:
        batch: B; all seeds of a batch come from one call, the first sequence's first.
    """
    return torch.randint(0, 2**63 - 1, (batch,)).tolist()


def request_seed(seed: int | None) -> int:
    """Seed of a request that is alone: what `request_seeds(1)` says after `torch.manual_seed(seed)`.

    Args:
        seed: The request's; None takes the next from torch's global generator.
    """
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


def uniform(keys: Tensor, positions: Tensor, purpose: Tensor | int) -> Tensor:
    """Uniform draws in [0, 1), float32 `[K]`.

    Args:
        keys: `key_of` each sequence's seed, int64 `[K, 2]`.
        positions: Position of the token that each is for, int64 `[K]`.
        purpose: What each is for: int64 `[K]`, or one for all.
    """
    words = _counters(keys, positions, purpose)  # [K, 2]
    return (_combined(words[:, 0], words[:, 1]) >> 8).to(torch.float32) * 2.0**-24


def gumbel(keys: Tensor, positions: Tensor, purpose: Tensor | int, vocabulary: int) -> Tensor:
    """Gumbel noise, float32 `[K, V]`: the argmax of scores plus it is a draw from their softmax.

    The number of an id does not depend on V.

    Args:
        keys: As `uniform` takes them.
        positions: As `uniform` takes them.
        purpose: As `uniform` takes it.
        vocabulary: V.
    """
    words = _counters(keys, positions, purpose)  # [K, 2]
    ids = torch.arange(0, vocabulary * _ID, _ID, device=keys.device)  # [V]
    bits = _combined(ids + words[:, :1] & _WORD, words[:, 1:])  # [K, V]
    # -log of a uniform number near 1 decides who wins; log1p keeps all 32 bits there, and neither end is reached
    below_one = (bits.to(torch.float32) + 0.5) * _TO_UNIT
    return torch.log1p(below_one.neg_()).neg_().log_().neg_()


def _counters(keys: Tensor, positions: Tensor, purpose: Tensor | int) -> Tensor:
    """Two words for each (seed, position, purpose), `[K, 2]`."""
    counter = positions * _POSITION + purpose * _PURPOSE & _WORD
    words = keys + counter[:, None] & _WORD
    # keys are mixed well, and what is made of the words is mixed again
    return (words ^ words >> 16) * _FIRST & _WORD


def _combined(first: Tensor, second: Tensor) -> Tensor:
    """One mixed word of two, which enter at different steps."""
    bits = (first ^ first >> 16) * _FIRST & _WORD
    bits = (bits ^ bits >> 15 ^ second) * _SECOND & _WORD
    return bits ^ bits >> 15
