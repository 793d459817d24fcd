"""Storage of the exit states of rows in flight: one slot for each row."""

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Ints
from sigma0.decode.ops import ExitState
from sigma0.decode.transfer import to_device

_FEWEST = 16


class ExitStatePool:
    """Slots of an `ExitState` that grows as needed.

    Attributes:
        state: The exit states, None before the first row.
        watched: Whether differences have been kept since the slots were taken.
    """

    def __init__(self) -> None:
        self.state: ExitState | None = None
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
        """Drops the states if the model was moved or cast."""
        if self.state is not None:
            kept = self.state.differences
            if (kept.shape[2], kept.dtype, kept.device) != (like.shape[1], like.dtype, like.device):
                self.state = None

    def _grow(self, more: int, like: Tensor) -> None:
        # never inference tensors: a cache may be continued outside of torch.inference_mode
        with torch.inference_mode(False):
            fresh = ExitState.empty(more, like.shape[1], like.dtype, like.device)
            if self.state is not None:
                pairs = zip(vars(self.state).values(), vars(fresh).values(), strict=True)
                fresh = ExitState(*(torch.cat(pair) for pair in pairs))
        self.state = fresh
