"""The coda of a token at every loop, after tokens that are read at loop T: what fidelity is measured on."""

import torch
from torch import Tensor

from sigma0.models.raven import RavenModel


class _Kept:
    """Takes the place of a cache: keeps the K/V of full depth."""

    def __init__(self) -> None:
        self.planes: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, plane: int) -> tuple[Tensor, Tensor]:
        """What is read, `[B, H_kv, S, d]` each: all that was written."""
        self.planes[plane] = keys, values
        return keys, values


class _Beside:
    """Takes the place of a cache: K/V of full depth, and after them those of the loop in question."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def update(self, keys: Tensor, values: Tensor, plane: int) -> tuple[Tensor, Tensor]:
        """What is read, `[B, H_kv, 2 S, d]` each."""
        full_keys, full_values = self._kept.planes[plane]
        return torch.cat([full_keys, keys], dim=2), torch.cat([full_values, values], dim=2)


def read_beside_full_depth(model: RavenModel, states: Tensor) -> Tensor:
    """What the head reads of each token at each loop, where those before it are read at loop T, `[T, B, S, D]`.

    Args:
        model: With a coda.
        states: `[T, B, S, D]`, of texts without pads on the left.
    """
    length, device = states.shape[2], states.device
    earlier = torch.ones((length, length), dtype=torch.bool, device=device).tril(-1)
    current = torch.eye(length, dtype=torch.bool, device=device)
    kept = _Kept()
    positions = torch.arange(length, device=device)[None]
    final = model.run_coda(states[-1], earlier | current, kept, positions)
    beside = torch.cat([earlier, current], dim=1)  # [S, 2 S]
    read = [model.run_coda(state, beside, _Beside(kept), positions) for state in states[:-1]]
    return torch.stack([*read, final])
