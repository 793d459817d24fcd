"""Rotary embeddings from a table: a pass needs those of a few rows, and the same ones in every layer."""

import torch
from torch import Tensor, nn

_SHORTEST = 256


class RotaryTable:
    """cos and sin of every position up to the furthest used so far.

    Args:
        rotary: transformers' module; its frequencies must not depend on the length of the text.
        pairs: Whether heads are rotated in neighbouring pairs, not in halves.
    """

    def __init__(self, rotary: nn.Module, pairs: bool = False) -> None:
        self._rotary = rotary
        self._pairs = pairs
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    def reserve(self, furthest: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Makes the table, or a longer one, where `furthest` positions are not in it; cos and sin `[positions, d]`."""
        cos, sin = self._cos, self._sin
        if cos is None or sin is None or (cos.device, cos.dtype) != (like.device, like.dtype) or len(cos) < furthest:
            # not as inference tensors: a later call outside of inference mode may need them
            with torch.inference_mode(False), torch.no_grad():
                everywhere = torch.arange(max(_SHORTEST, 2 * furthest), device=like.device)
                cos, sin = self._rotary(torch.empty((), dtype=like.dtype, device=like.device), everywhere[None])
            cos, sin = cos[0], sin[0].clone()
            half = sin.shape[1] // 2
            sin[:, :half].neg_()
            if self._pairs:
                # the frequency of a pair stands once in each half
                cos, sin = (part.unflatten(1, (2, half)).transpose(1, 2).flatten(1) for part in (cos, sin))
            self._cos, self._sin = cos, sin
        return cos, sin

    def rows(self, positions: Tensor, furthest: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin `[R, 1, d]` of `positions` `[R]`.

        The first half of the sines, which multiplies the second half of a head, has its sign turned; likewise the
        first of every pair.

        Args:
            positions: int64 `[R]`, on the device of `like`.
            furthest: The largest of them, or a bound on it.
            like: Any tensor with the wanted device and dtype.
        """
        cos, sin = self.reserve(furthest, like)
        return cos.index_select(0, positions)[:, None], sin.index_select(0, positions)[:, None]
