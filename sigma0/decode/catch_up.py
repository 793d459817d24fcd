"""Tokens that wait for their deeper loops, run to full depth ahead of a forward of several tokens."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import LoopedModel, PassRows
from sigma0.decode.batch import Frontier
from sigma0.decode.dropped import settle
from sigma0.decode.kv_cache import DepthCache


def admit_skipped(model: LoopedModel, cache: DepthCache, attention_mask: Tensor | None) -> None:
    """Puts tokens that were never run before loop 1, where a later token may see them.

    Args:
        model: The looped model.
        cache: Planes, frontier and skipped tokens; none are skipped afterwards.
        attention_mask: The coming forward's mask `[B, S]`; tokens that it hides stay unwritten. None hides none.
    """
    skipped = cache.skipped
    if skipped is None:
        return
    cache.skipped = None
    if attention_mask is not None and attention_mask.dim() == 2:
        shown = attention_mask.bool().cpu().numpy()[skipped.sequences, skipped.columns]
        skipped = skipped.select(np.flatnonzero(shown))
    if not len(skipped.columns):
        return
    with torch.no_grad():
        hidden = model.embed(torch.from_numpy(skipped.token_ids).to(model.device))
    loops = np.zeros(len(skipped.columns), dtype=np.int64)
    entrants = Frontier(hidden, skipped.sequences, skipped.columns, skipped.positions, loops, loops - 1)
    cache.frontier = entrants if cache.frontier is None else cache.frontier.concatenate(entrants)


@torch.no_grad()
def complete(model: LoopedModel, cache: DepthCache) -> None:
    """Runs every waiting token to full depth, ahead of a forward of several tokens; counted as prompt rows.

    Args:
        model: The looped model.
        cache: Planes and frontier; the frontier is empty afterwards, and every plane written.
    """
    settle(cache)
    while (frontier := cache.frontier) is not None:
        hidden = model.norm(model.block(frontier.hidden, PassRows(cache, frontier, model.operations)))
        cache.counts.prompt_rows += len(frontier)
        assert cache.depth is not None
        loops = frontier.loops + 1
        kept = np.flatnonzero(loops < cache.depth)
        cache.frontier = replace(frontier, hidden=hidden, loops=loops).select(kept) if len(kept) else None
