"""Prelude and coda of the rows of a pass: layers that run once for a token, over K/V planes of their own.

A prelude runs in the pass of a token's first loop. A coda runs whenever a token is read, and its K/V stay as that
reading left them, so that later tokens see each token as it was read: in plane READ. Under `verify` what is emitted is
read at loop T over plane FINAL, which only such readings and prompts write; the K/V of drafts never come into it. Plane
READ takes over what FINAL says, so that drafts see the best that is known of the tokens before them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import copy_plane
from sigma0.decode.planes import FINAL, READ, LayerPlanes
from sigma0.decode.prefill import Prefill
from sigma0.decode.step_batch import Batch


def run_prelude(batch: Batch, hidden: Tensor, rows: RowIndices, count: int, live: Tensor | None) -> Tensor:
    """States of a pass `[R, W]` whose first rows may be tokens that run their first loop.

    Args:
        batch: What the step works on.
        hidden: `[R, W]`.
        rows: Their places.
        count: Of the first rows that may be such tokens.
        live: Which of those are, bool `[count]`; None where all are.
    """
    first = hidden[:count]
    sequences, cache_positions, positions = (
        part[:count] for part in (rows.sequences, rows.cache_positions, rows.positions)
    )
    indices = RowIndices(sequences, cache_positions, positions, torch.zeros_like(sequences))
    view = PassRows(batch.layers, batch.placement, indices, batch.ops, batch.longest, live)
    entered = batch.model.prelude(first, view)
    if live is not None:
        entered = torch.where(live[:, None], entered, first)
    return entered if count == len(hidden) else torch.cat([entered, hidden[count:]])


def prefill_prelude(batch: Batch, beside: Prefill) -> None:
    """Runs the prelude of chunks that are about to run their first loop; before that of lanes, which read its K/V."""
    for place, chunk in enumerate(beside.chunks):
        if chunk.loops == 0:
            view = PassRows(batch.layers, batch.placement, chunk.rows(batch.lanes.device), batch.ops, batch.longest)
            beside.chunks[place] = replace(chunk, hidden=batch.model.prelude(chunk.hidden, view))


def prefill_coda(batch: Batch, beside: Prefill) -> None:
    """Leaves the coda's K/V of positions that have run the loop at which they are read, none before one ahead of it.

    Where exits differ, a position may be at its loop before those that it sees are at theirs: it waits for them, and
    rows that are read together see each other. What was read at an exit sees plane READ, even if that was loop T.
    """
    model, layers, place, longest = batch.model, batch.layers, batch.placement, batch.longest
    for read in beside.take_read():
        at_end = (read.reads == batch.lanes.depth) & (read.positions < read.final)
        final, early = np.flatnonzero(at_end), np.flatnonzero(~at_end)
        if len(final):
            own = read.select(final)
            write_coda(model, layers, place, own.hidden, own.rows(batch.lanes.device), longest)
        if len(early):
            own = read.select(early)
            rows = own.rows(batch.lanes.device)
            at_exit = replace(rows, loops=torch.full_like(rows.loops, READ))
            model.read(own.hidden, PassRows(layers, place, at_exit, batch.ops, longest))


def read_rows(batch: Batch, hidden: Tensor, rows: RowIndices, live: Tensor | None) -> Tensor:
    """Logits `[K, V]` of rows that are read.

    Args:
        batch: What the step works on.
        hidden: `[K, W]`.
        rows: Their places; `loops` are loops finished.
        live: Which of them count, bool `[K]`; None where all do.
    """
    model = batch.model
    if not model.stages[1]:
        return model.read(hidden)
    planes = torch.zeros_like(rows.loops)
    if batch.program.verify:
        checked = batch.settings.table[:, columns.VERIFY].index_select(0, rows.sequences) > 0
        planes = ((rows.loops >= batch.lanes.depth) & checked).long() * FINAL
    indices = RowIndices(rows.sequences, rows.cache_positions, rows.positions, planes)
    logits = model.read(hidden, PassRows(batch.layers, batch.placement, indices, batch.ops, batch.longest, live))
    if batch.program.verify:
        written = planes == FINAL if live is None else (planes == FINAL) & live
        place = batch.placement
        # nobody's position lies last
        at = torch.where(written, place.flat(rows.sequences, rows.cache_positions), place.total - 1)
        publish(model, batch.layers, at)
    return logits


def write_coda(
    model: LoopedModel,
    layers: Sequence[LayerPlanes],
    placement: Placement,
    hidden: Tensor,
    rows: RowIndices,
    longest: int,
) -> None:
    """Leaves the coda's K/V of rows at loop T in both planes, as a prefill does, without logits that anybody wants.

    Args:
        model: With a coda.
        layers: All planes.
        placement: Where cache positions lie.
        hidden: `[K, W]`.
        rows: Their places.
        longest: Bound on cache positions, plus one.
    """
    final = torch.full_like(rows.loops, FINAL)
    indices = RowIndices(rows.sequences, rows.cache_positions, rows.positions, final)
    model.read(hidden, PassRows(layers, placement, indices, model.operations, longest))
    publish(model, layers, placement.flat(rows.sequences, rows.cache_positions))


def publish(model: LoopedModel, layers: Sequence[LayerPlanes], positions: Tensor) -> None:
    """Copies the coda's K/V of flat positions `[N]` from plane FINAL to plane READ."""
    for layer in layers[len(layers) - model.stages[1] :]:
        copy_plane(layer.flat_keys, layer.flat_values, positions, FINAL, READ)
