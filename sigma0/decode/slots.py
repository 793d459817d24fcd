"""Where the trajectories of the rows between loop 1 and T are kept: one slot for each row of a frontier."""

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Ints
from sigma0.decode.ops import BoundaryState
from sigma0.decode.transfer import to_device

_FEWEST = 16


class SlotPool:
    """Slots of a `BoundaryState` that grows as rows need them.

    Attributes:
        state: What is remembered, None before the first row.
        watched: Whether the rows' differences have been kept since they took their slots.
    """

    def __init__(self) -> None:
        self.state: BoundaryState | None = None
        self.watched = False

    def take(self, count: int, used: Ints, like: Tensor) -> Ints:
        """Fresh slots, `[count]`.

        Args:
            count: How many.
            used: Slots that are taken, `[N]`.
            like: States `[R, D]` of the rows, for width, dtype and device.
        """
        self._fit(like)
        size = 0 if self.state is None else len(self.state.counts)
        free = np.setdiff1d(np.arange(size), used, assume_unique=True)
        if len(free) < count:
            grown = max(_FEWEST, 2 * size, size + count)
            self._grow(grown - size, like)
            free = np.concatenate([free, np.arange(size, grown)])
        slots = free[:count]
        assert self.state is not None
        self.state.counts.index_fill_(0, to_device(slots, like.device), 0)
        return slots

    def _fit(self, like: Tensor) -> None:
        """Starts anew where the model was moved or cast."""
        if self.state is not None:
            kept = self.state.differences
            if (kept.shape[2], kept.dtype, kept.device) != (like.shape[1], like.dtype, like.device):
                self.state = None

    def _grow(self, more: int, like: Tensor) -> None:
        # never inference tensors: a cache may be continued outside of torch.inference_mode
        with torch.inference_mode(False):
            fresh = BoundaryState.empty(more, like.shape[1], like.dtype, like.device)
            if self.state is not None:
                pairs = zip(vars(self.state).values(), vars(fresh).values(), strict=True)
                fresh = BoundaryState(*(torch.cat(pair) for pair in pairs))
        self.state = fresh
