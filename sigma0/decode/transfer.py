"""Bookkeeping on the host, and between host and device so that neither waits for the other without need.

`tensor.to(device)` of ordinary host memory makes the host wait for the device's queue, and so do `.tolist()`, `bool()`
and `.cpu()`. Here indices are copied from pinned memory, in the order of the queue, and results come back through
`to_host`, or through a `AsyncCopy` once it has landed, which is where a decoder waits.
`torch.cuda.set_sync_debug_mode("error")` therefore holds around a whole pass.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, queued and not waited for; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class AsyncCopy:
    """A tensor on its way to the host.

    Args:
        tensor: May change once this is made: what is queued after the copy is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._done: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._landed = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
            return
        self._landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._landed.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(tensor.device))

    def array(self) -> npt.NDArray[Any]:
        """The tensor as an array, once the device has got that far; what was queued after it is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        return np.asarray(self._landed)


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor as an array, once the device has got that far."""
    return np.asarray(tensor.detach()) if tensor.device.type == "cpu" else AsyncCopy(tensor).array()


@dataclass(frozen=True)
class PendingTokens:
    """Tokens with a cache position for which no loop has run, `[N]` each; `positions` are for rotary embeddings."""

    token_ids: Ints
    sequences: Ints
    cache_positions: Ints
    positions: Ints

    def select(self, rows: Ints) -> "PendingTokens":
        """The tokens with these indices."""
        return PendingTokens(*(part[rows] for part in vars(self).values()))

    def concatenate(self, other: "PendingTokens") -> "PendingTokens":
        """These tokens, then those of `other`."""
        return PendingTokens(*map(np.concatenate, zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class PassCounts:
    """What was computed, in applications of the shared block to one token."""

    passes: int = 0  # Calls of the block after the prompt
    rows: int = 0  # Rows in those calls
    prompt_rows: int = 0  # Rows of prompts, pads left out, and of tokens caught up before a later prompt
    head_rows: int = 0  # Rows that the output head read after the prompt
    prompt_chunks: int = 0  # Chunks of prompts in an engine's passes
