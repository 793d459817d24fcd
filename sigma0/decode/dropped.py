"""Tokens whose deeper loops were never run: a reader at loop t takes their plane min(t, e), e the loop they stopped at.

Where attention reads each column at a plane of its own, the exits are written down and nothing is copied. Where it
reads whole planes, and ahead of a forward of several tokens, the K/V of the exit are copied to the planes behind it.
"""

import torch
from torch import Tensor

from sigma0.decode.kv_cache import DepthCache


def remember_exits(cache: DepthCache, sequences: Tensor, columns: Tensor, planes: Tensor) -> None:
    """Writes down the last plane of some tokens.

    Args:
        cache: Planes and exits.
        sequences: Batch index, int64 `[N]`.
        columns: `[N]`.
        planes: Plane of the loop at which each stopped, counted from 0, int64 `[N]`.
    """
    assert cache.depth is not None
    if cache.exits is None:
        # never an inference tensor: a cache may be continued outside of torch.inference_mode
        with torch.inference_mode(False):
            room = max(cache.store.capacity, cache.length)
            cache.exits = torch.full((cache.batch, room), cache.depth - 1, dtype=torch.int32, device=sequences.device)
    cache.reserve_exits(cache.length)
    cache.exits[sequences, columns] = planes.int()


def settle(cache: DepthCache) -> None:
    """Copies what `remember_exits` wrote down, so that every plane holds what a reader there must see."""
    exits, depth = cache.exits, cache.depth
    if exits is None or depth is None:
        return
    cache.exits = None
    sequences, columns = (exits[:, : cache.length] < depth - 1).nonzero(as_tuple=True)
    if len(sequences):
        copy_down(cache, sequences, columns, exits[sequences, columns].long())


def copy_down(cache: DepthCache, sequences: Tensor, columns: Tensor, planes: Tensor) -> None:
    """Copies the K/V of some tokens from one plane to all behind it.

    Args:
        cache: The planes.
        sequences: Batch index, int64 `[N]`.
        columns: `[N]`.
        planes: The last plane that was written, counted from 0, int64 `[N]`.
    """
    assert cache.depth is not None
    targets = torch.arange(1, cache.depth, device=planes.device)[:, None]  # [T - 1, 1]
    sources = torch.minimum(targets, planes)  # [T - 1, N]; a plane up to the exit is copied to itself
    by_device: dict[torch.device, tuple[Tensor, ...]] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device not in by_device:
            by_device[tensor.device] = tuple(
                index.to(tensor.device) for index in (targets, sources, sequences, columns)
            )
        write, read, rows, places = by_device[tensor.device]
        tensor[write, rows, :, places] = tensor[read, rows, :, places]
        return tensor

    for layer in cache.planes:
        layer.map(copied)
