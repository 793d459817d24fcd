"""Catch-up: the missing K/V of deeper loops, filled before a prefill."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.lanes import STAGE
from sigma0.decode.model import LoopedModel
from sigma0.decode.planes import READ
from sigma0.decode.stages import write_coda
from sigma0.decode.transfer import PendingTokens


@torch.no_grad()
def enter_pending(model: LoopedModel, cache: DepthCache, attention_mask: Tensor | None) -> None:
    """Puts pending tokens before loop 1, unless no later token may attend to them.

    Args:
        model: The looped model.
        cache: Planes, lanes and pending tokens; none are pending afterwards.
        attention_mask: The coming forward's mask `[B, S]`; K/V of tokens that it masks stay unwritten. None masks
            none.
    """
    pending = cache.pending
    if pending is None:
        return
    if attention_mask is not None and attention_mask.dim() == 2:
        shown = attention_mask.bool().cpu().numpy()[pending.sequences, pending.cache_positions]
        pending = pending.select(np.flatnonzero(shown))
    cache.pending = pending if len(pending.cache_positions) else None
    if cache.pending is None:
        return
    hidden = _embedded(model, pending)
    lanes = cache.reserve_lanes(hidden, model.state_width)
    sequences, cache_positions, positions = (
        torch.from_numpy(part).to(lanes.device)
        for part in (pending.sequences, pending.cache_positions, pending.positions)
    )
    wanted = lanes.lane_of(sequences, cache_positions)
    alone = len(np.unique(pending.sequences)) == len(pending.sequences)
    # a prelude and a coda run for tokens that are read; these are not
    if model.stages != (0, 0) or not alone or bool((lanes.table[wanted, STAGE] != lanes.idle).any()):
        catch_up(model, cache)
        return
    cache.pending = None
    cache.reserve_positions(cache.length)
    lanes.enter(wanted, hidden, cache_positions, positions, stage=lanes.depth)


@torch.no_grad()
def catch_up(model: LoopedModel, cache: DepthCache) -> None:
    """Runs every token in flight to full depth before a forward of several tokens; counted as prompt rows.

    Args:
        model: The looped model.
        cache: Planes, lanes and pending tokens; none is in flight or pending afterwards, and every plane is written.
    """
    cache.fill_final()
    if cache.lanes is not None:
        cache.lanes.resume()
    in_flight, pending = cache.in_flight, cache.pending
    cache.pending, parts = None, []
    if in_flight is not None:
        parts.append(
            (in_flight.hidden, in_flight.sequences, in_flight.cache_positions, in_flight.positions, in_flight.loops)
        )
    read = sum(len(part[1]) for part in parts)
    if pending is not None:
        loops = np.zeros(len(pending.sequences), dtype=np.int64)
        hidden = _embedded(model, pending)
        parts.append((hidden, pending.sequences, pending.cache_positions, pending.positions, loops))
    if not parts:
        return
    hidden = torch.cat([part[0] for part in parts])
    cache.reserve_positions(cache.length)
    indices = [torch.from_numpy(np.concatenate([part[column] for part in parts])) for column in range(1, 5)]
    rows = RowIndices(*(index.to(hidden.device) for index in indices))
    unread = torch.arange(len(rows.loops), device=hidden.device) >= read
    if cache.segment is None:
        _run_to_full_depth(model, cache, hidden, rows, unread)
    else:
        segments = indices[1] // cache.segment
        for segment in sorted(set(segments.tolist())):
            own = (segments == segment).nonzero()[:, 0].to(hidden.device)
            part = RowIndices(*(column.index_select(0, own) for column in vars(rows).values()))
            _run_to_full_depth(model, cache, hidden.index_select(0, own), part, unread.index_select(0, own))
            cache.encode(min((segment + 1) * cache.segment, cache.length))
    if cache.lanes is not None:
        cache.lanes.table[:, STAGE] = cache.lanes.idle


def _embedded(model: LoopedModel, pending: PendingTokens) -> Tensor:
    ids, positions = (torch.from_numpy(part).to(model.device) for part in (pending.token_ids, pending.positions))
    return model.enter(ids, positions)


def _run_to_full_depth(model: LoopedModel, cache: DepthCache, hidden: Tensor, rows: RowIndices, unread: Tensor) -> None:
    """Runs rows to loop T.

    Args:
        model: The looped model.
        cache: Planes with room for them.
        hidden: `[R, W]`.
        rows: Their places.
        unread: Which of them nobody has read, bool `[R]`: a coda leaves their K/V at loop T, as a prompt's.
    """
    assert cache.depth is not None
    layers, placement, ops = cache.planes, cache.placement(cache.length), model.operations
    first = (rows.loops == 0).nonzero()[:, 0]
    if model.stages[0] and len(first):
        own = RowIndices(*(column.index_select(0, first) for column in vars(rows).values()))
        entered = model.prelude(hidden.index_select(0, first), PassRows(layers, placement, own, ops, cache.length))
        hidden = hidden.index_copy(0, first, entered)
    while len(rows.loops):
        view = PassRows(layers, placement, rows, ops, cache.length)
        hidden = model.norm(model.loop(hidden, view))
        cache.counts.prompt_rows += len(rows.loops)
        goes_on = rows.loops + 1 < cache.depth
        over = (~goes_on & unread).nonzero()[:, 0]
        if model.stages[1] and len(over):
            own = RowIndices(*(column.index_select(0, over) for column in vars(rows).values()))
            states = hidden.index_select(0, over)
            if cache.lacks_final:
                # tokens before them left nothing in the plane of full depth
                own = replace(own, loops=torch.full_like(own.loops, READ))
                model.read(states, PassRows(layers, placement, own, ops, cache.length))
            else:
                write_coda(model, layers, placement, states, own, cache.length)
        left = goes_on.nonzero()[:, 0]
        columns = [column.index_select(0, left) for column in vars(rows).values()]
        columns[-1] += 1
        hidden, rows, unread = hidden.index_select(0, left), RowIndices(*columns), unread.index_select(0, left)
