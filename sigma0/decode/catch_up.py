"""Catch-up: the missing K/V of deeper loops, filled before a prefill or copied from the exit (`drop`)."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import PassRows
from sigma0.decode.batch import RowBatch
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import LoopedModel


def enter_pending(model: LoopedModel, cache: DepthCache, attention_mask: Tensor | None) -> None:
    """Puts pending tokens before loop 1, unless no later token may attend to them.

    Args:
        model: The looped model.
        cache: Planes, in-flight batch and pending tokens; none are pending afterwards.
        attention_mask: The coming forward's mask `[B, S]`; K/V of tokens that it masks stay unwritten. None masks
            none.
    """
    pending = cache.pending
    if pending is None:
        return
    cache.pending = None
    if attention_mask is not None and attention_mask.dim() == 2:
        shown = attention_mask.bool().cpu().numpy()[pending.sequences, pending.cache_positions]
        pending = pending.select(np.flatnonzero(shown))
    if not len(pending.cache_positions):
        return
    with torch.no_grad():
        hidden = model.embed(torch.from_numpy(pending.token_ids).to(model.device))
    loops = np.zeros(len(pending.cache_positions), dtype=np.int64)
    entrants = RowBatch(hidden, pending.sequences, pending.cache_positions, pending.positions, loops, loops - 1)
    cache.in_flight = entrants if cache.in_flight is None else cache.in_flight.concatenate(entrants)


@torch.no_grad()
def catch_up(model: LoopedModel, cache: DepthCache) -> None:
    """Runs every token in flight to full depth before a forward of several tokens; counted as prompt rows.

    Args:
        model: The looped model.
        cache: Planes and in-flight batch; no token is in flight afterwards, and every plane is written.
    """
    materialize_exits(cache)
    while (in_flight := cache.in_flight) is not None:
        hidden = model.norm(model.block(in_flight.hidden, PassRows(cache, in_flight, model.operations)))
        cache.counts.prompt_rows += len(in_flight)
        assert cache.depth is not None
        loops = in_flight.loops + 1
        kept = np.flatnonzero(loops < cache.depth)
        cache.in_flight = replace(in_flight, hidden=hidden, loops=loops).select(kept) if len(kept) else None


def record_exits(cache: DepthCache, sequences: Tensor, cache_positions: Tensor, planes: Tensor) -> None:
    """Records the last plane of tokens that exit under `drop`: a reader at loop t takes plane min(t, exit).

    For attention that picks a plane for each cache position, nothing is copied.

    Args:
        cache: Planes and exits.
        sequences: Batch index, int64 `[N]`.
        cache_positions: `[N]`.
        planes: Plane of the loop at which each exited, counted from 0, int64 `[N]`.
    """
    assert cache.depth is not None
    if cache.exits is None:
        # never an inference tensor: a cache may be continued outside of torch.inference_mode
        with torch.inference_mode(False):
            room = max(cache.store.capacity, cache.length)
            cache.exits = torch.full((cache.batch, room), cache.depth - 1, dtype=torch.int32, device=sequences.device)
    cache.reserve_exits(cache.length)
    cache.exits[sequences, cache_positions] = planes.int()


def materialize_exits(cache: DepthCache) -> None:
    """Materialises the exits that `record_exits` has recorded, for attention that reads whole planes."""
    exits, depth = cache.exits, cache.depth
    if exits is None or depth is None:
        return
    cache.exits = None
    sequences, cache_positions = (exits[:, : cache.length] < depth - 1).nonzero(as_tuple=True)
    if len(sequences):
        propagate_past_exit(cache, sequences, cache_positions, exits[sequences, cache_positions].long())


def propagate_past_exit(cache: DepthCache, sequences: Tensor, cache_positions: Tensor, planes: Tensor) -> None:
    """Copies the K/V of tokens from the plane of their exit to all deeper planes.

    Args:
        cache: The planes.
        sequences: Batch index, int64 `[N]`.
        cache_positions: `[N]`.
        planes: The last plane that was written, counted from 0, int64 `[N]`.
    """
    assert cache.depth is not None
    targets = torch.arange(1, cache.depth, device=planes.device)[:, None]  # [T - 1, 1]
    sources = torch.minimum(targets, planes)  # [T - 1, N]; a plane up to the exit is copied to itself
    by_device: dict[torch.device, tuple[Tensor, ...]] = {}

    def copy_deeper(tensor: Tensor) -> Tensor:
        if tensor.device not in by_device:
            by_device[tensor.device] = tuple(
                index.to(tensor.device) for index in (targets, sources, sequences, cache_positions)
            )
        write, read, rows, where = by_device[tensor.device]
        tensor[write, rows, :, where] = tensor[read, rows, :, where]
        return tensor

    for layer in cache.planes:
        layer.map(copy_deeper)
