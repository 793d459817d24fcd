"""Random numbers without a state: each is a hash of what it is for, so nothing else can change it.

A number belongs to (seed of the sequence, position of the token, purpose, id), and is computed in integers on the
device. So a sequence draws the same tokens alone, in any batch, after a preemption and from any runner.
"""

import torch
from torch import Tensor

from sigma0.decode.ops import combined, counter_words

_WORD = 0xFFFF_FFFF
_LONG = 0xFFFF_FFFF_FFFF_FFFF
# What a number is for. A token is drawn once where it is read first; under `verify` each deeper loop may test it, and
# draw another in its place.
OWN_DRAW = 0


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
    words = counter_words(keys, positions, purpose)  # [K, 2]
    return (combined(words[:, 0], words[:, 1]) >> 8).to(torch.float32) * 2.0**-24
