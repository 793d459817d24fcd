"""A step: every token in flight runs one loop, and what stops is read, judged and fed back.

    rows      the live lanes, decoding ones first; the host knows how many there are, or a bound
    block     one loop of the shared layers; K/V of a row go to the plane of its loop, which it attends to
    loop end  norm, gate, statistics, and the decision of each row's own rule
    read      logits of the rows that stop; under `margin` of all that decode; under `verify` of drafts too
    sample    an id for each row that was read
    accept    under `verify`, the oldest draft that does not stand wins over everything behind it
    advance   ids are fed back in the next lane; what has ended is not
    emit      one line for each row that was read

No part of it reads a value of a tensor on the host. Which parts a step has is said by a `Program`, and how many rows by
the caller, so that a step has one fixed shape for each of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, Placement, RowIndices
from sigma0.decode.finite import BROKEN
from sigma0.decode.lanes import (
    CACHE_POSITION,
    CUMULATIVE,
    DIVERGED_FLAG,
    FLAGS,
    MET_FLAG,
    NO_DRAFT,
    STAGE,
    SURVIVAL,
    Lanes,
)
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import DIVERGED, LAST_LOOP, MET, Operations
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.prefill import PassPlace, Prefill
from sigma0.decode.settings import NO_LIMIT, Program, SequenceSettings

# Columns of what a step emits.
EMITTED, SEQUENCE, TOKEN, READ_AT, FED_AT, WHY, ENDS, STANDS = range(8)


@dataclass(frozen=True)
class Batch:
    """What a step works on.

    Attributes:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        program: What a pass has to compute.
        layers: Planes of every layer.
        placement: Where cache positions lie.
        longest: Bound on the cache positions of a pass, plus one.
        ops: Operations of a pass.
    """

    model: LoopedModel
    lanes: Lanes
    settings: SequenceSettings
    program: Program
    layers: Sequence[LayerPlanes]
    placement: Placement
    longest: int
    ops: Operations


@dataclass(frozen=True)
class Looped:
    """Rows that have run one loop more; those that decode come first.

    Attributes:
        lanes: Lane of each, `[R]`.
        table: Their lines of the table of lanes, from before the loop, `[R, 6]`.
        sequences: `[R]`.
        loops: Loops that each has finished, `[R]`.
        hidden: `[R, D]`.
        codes: Of the decoding rows: 0 where one goes on, else why it stops (`MET`, `LAST_LOOP`, `DIVERGED`), `[L]`.
        logits: Of the decoding rows, `[L, V]`; None where the head has not read them.
    """

    lanes: Tensor
    table: Tensor
    sequences: Tensor
    loops: Tensor
    hidden: Tensor
    codes: Tensor
    logits: Tensor | None


def run_loop(batch: Batch, count: int, decoding: int, beside: Prefill | None = None) -> Looped:
    """Rows, block and loop end.

    Args:
        batch: Lanes, settings and planes.
        count: R, live lanes.
        decoding: L, those of them that decode.
        beside: Prefill that runs a loop in the same pass; None for none.
    """
    lanes, depth = batch.lanes, batch.lanes.depth
    rows = lanes.table[:-1, STAGE].sort(stable=True).indices[:count]
    table = lanes.table.index_select(0, rows)  # [R, 6]
    stage, cache_positions, positions = table[:, STAGE], table[:, CACHE_POSITION], table[:, 2]
    sequences, planes = rows // depth, stage % depth
    previous = lanes.hidden.index_select(0, rows)  # [R, D]
    indices = RowIndices(sequences, cache_positions, positions, planes)
    if beside is None:
        view = PassRows(batch.layers, batch.placement, indices, batch.ops, batch.longest)
        raw = batch.model.loop(previous, view)
    else:
        place = PassPlace(batch.layers, batch.placement, batch.ops, batch.longest)
        raw = beside.loop(batch.model, place, indices, previous)
    loops = planes + 1
    hidden, codes, logits = _loop_end(batch, raw, previous, rows, sequences, loops, decoding)
    lanes.hidden.index_copy_(0, rows, hidden)
    if batch.program.paths:
        assert lanes.paths is not None
        lanes.paths[lanes.path_index(sequences, cache_positions), planes] = hidden
    own = batch.settings.table.index_select(0, sequences[:decoding])  # [L, 10]
    last = loops[:decoding] >= own[:, columns.LAST]
    if batch.program.forced:
        codes = _forced(batch, table[:decoding], sequences[:decoding], loops[:decoding], own, last)
    elif not batch.program.known:
        codes = batch.ops.broadcast(torch.where((codes == DIVERGED) & last, LAST_LOOP, codes))
    else:
        codes = last * LAST_LOOP
    if batch.program.verify and batch.program.prompts:
        codes = _hold_prompts(batch, table, rows, loops, own, codes)
    _advance_stages(batch, rows, table, loops, own, codes)
    return Looped(rows, table, sequences, loops, hidden, codes, logits)


def _loop_end(
    batch: Batch, raw: Tensor, previous: Tensor, rows: Tensor, sequences: Tensor, loops: Tensor, decoding: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normed states `[R, D]`, decisions of the decoding rows `[L]`, and their logits where the rule reads them."""
    model, lanes, settings, program = batch.model, batch.lanes, batch.settings, batch.program
    ops = batch.ops
    if program.watch or ops.backend == "triton":
        end = ops.loop_end(model, raw, previous, lanes.watch(), rows, settings.rows(program, sequences))
        hidden, codes = end.hidden, end.decisions[:decoding].long()
    else:
        hidden = model.norm(raw)
        codes = (loops[:decoding] >= settings.table[:, columns.LAST].index_select(0, sequences[:decoding])) * LAST_LOOP
        if program.gate and decoding:
            met = _gate_met(batch, hidden[:decoding], rows[:decoding], sequences[:decoding], loops[:decoding])
            codes = codes.masked_fill(met, MET)
    if not program.margin or not decoding:
        return hidden, codes, None
    logits = model.read(hidden[:decoding])  # [L, V]
    theta = settings.thresholds[:, columns.THETA].index_select(0, sequences[:decoding])
    late = loops[:decoding] >= settings.table[:, columns.MIN_LOOPS].index_select(0, sequences[:decoding])
    return hidden, codes.masked_fill(ops.leads(logits, theta) & late, MET), logits


def _gate_met(batch: Batch, hidden: Tensor, lanes: Tensor, sequences: Tensor, loops: Tensor) -> Tensor:
    """Whether `qexit` is met, bool `[L]`: `kernels.loop_end` where nothing else is kept of a token."""
    settings = batch.settings
    hazard = torch.sigmoid(batch.model.gate(hidden).float())
    kept = batch.lanes.gate.index_select(0, lanes)
    survival, cumulative = kept[:, SURVIVAL], kept[:, CUMULATIVE] + hazard * kept[:, SURVIVAL]
    batch.lanes.gate.index_copy_(0, lanes, torch.stack([survival * (1.0 - hazard), cumulative], dim=-1))
    met = cumulative >= settings.thresholds[:, columns.Q].index_select(0, sequences)
    return met & (loops >= settings.table[:, columns.MIN_LOOPS].index_select(0, sequences))


def _forced(batch: Batch, table: Tensor, sequences: Tensor, loops: Tensor, own: Tensor, last: Tensor) -> Tensor:
    """Decisions that are given beforehand, `[L]`."""
    exits = batch.settings.exits
    assert exits is not None
    token = (table[:, CACHE_POSITION] - own[:, columns.PROMPT]) % exits.shape[1]
    return (last * LAST_LOOP).masked_fill(loops >= exits[sequences, token], MET)


def _hold_prompts(
    batch: Batch, table: Tensor, rows: Tensor, loops: Tensor, own: Tensor, codes: Tensor
) -> Tensor:
    """Under `verify` the last token of a prompt is read at loop T, and only notes how its rule stood first."""
    decoding, depth = len(codes), batch.lanes.depth
    holds = (own[:, columns.VERIFY] > 0) & (table[:decoding, CACHE_POSITION] < own[:, columns.PROMPT])
    flags = table[:decoding, FLAGS]
    noted = torch.where(codes == MET, MET_FLAG, torch.where(codes == DIVERGED, DIVERGED_FLAG, 0))
    flags = torch.where(holds & (flags == 0), noted, flags)
    batch.lanes.table[:, FLAGS].index_copy_(0, rows[:decoding], flags)
    at_end = torch.where(flags == MET_FLAG, MET, LAST_LOOP) * (loops[:decoding] >= depth)
    return torch.where(holds, at_end, codes)


def _advance_stages(batch: Batch, rows: Tensor, table: Tensor, loops: Tensor, own: Tensor, codes: Tensor) -> None:
    """Every row is a loop further; a row that stops only fills its planes from now on, or leaves."""
    lanes, decoding = batch.lanes, len(codes)
    stage = table[:, STAGE] + 1
    if decoding:
        stops = codes > 0
        trailing = stage[:decoding] + stops * lanes.depth
        if batch.program.leaves:
            in_answer = table[:decoding, CACHE_POSITION] >= own[:, columns.PROMPT]
            at_last = loops[:decoding] >= own[:, columns.LAST]
            leaves = stops & (own[:, columns.LEAVES] > 0) & (in_answer | at_last)
            trailing = trailing.masked_fill(leaves, lanes.idle)
        stage[:decoding] = trailing
    lanes.table[:, STAGE].index_copy_(0, rows, stage)


def read(batch: Batch, looped: Looped, which: Tensor) -> Tensor:
    """Logits `[K, V]` of rows, int64 `[K]`."""
    if looped.logits is not None and not batch.program.verify:
        return looped.logits.index_select(0, which)
    return batch.model.read(looped.hidden.index_select(0, which))


def sample_greedy(batch: Batch, logits: Tensor) -> Tensor:
    """The argmax `[K]` of logits, `BROKEN` where they are not finite."""
    best = logits.max(dim=-1)
    return batch.ops.broadcast(torch.where(best.values.isfinite(), best.indices, BROKEN))


def settle(batch: Batch, looped: Looped, which: Tensor, token_ids: Tensor, ends: Tensor | None = None) -> Tensor:
    """Advance and emit, where no sequence checks drafts: every row that was read stops.

    Args:
        batch: Lanes and settings.
        looped: The rows.
        which: Rows that were read, int64 `[K]`.
        token_ids: What was sampled from each, `[K]`.
        ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.

    Returns:
        int64 `[K, 8]`.
    """
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    if ends is None:
        ends = _ends(batch, sequences, table[:, CACHE_POSITION], token_ids)
    codes = looped.codes.index_select(0, which)
    flags = (codes == MET) * MET_FLAG + (codes == DIVERGED) * DIVERGED_FLAG
    _enter(batch, looped.lanes.index_select(0, which), table, token_ids, ends)
    loops, fed_at = looped.loops.index_select(0, which), table[:, CACHE_POSITION] + 1
    ones = torch.ones_like(flags)
    return torch.stack([ones, sequences, token_ids, loops, fed_at, flags, ends.long(), ones], dim=1)


def settle_verified(
    batch: Batch,
    looped: Looped,
    which: Tensor,
    token_ids: Tensor,
    stands: Tensor,
    ends: Tensor | None = None,
) -> Tensor:
    """Accept, advance and emit, where some sequence checks drafts.

    Args:
        batch: Lanes and settings.
        looped: The rows.
        which: Rows that were read: those that stop, and drafts that are checked, int64 `[K]`.
        token_ids: What holds for each now: a new id, or the draft where it stands, `[K]`.
        stands: Whether a draft stands, bool `[K]`.
        ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.

    Returns:
        int64 `[K, 8]`.
    """
    lanes, depth = batch.lanes, batch.lanes.depth
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    stage, cache_positions, _, drafts, depths, flags = table.unbind(1)
    loops, rows = looped.loops.index_select(0, which), looped.lanes.index_select(0, which)
    decodes = stage < depth
    # the oldest draft that falls takes everything behind it along
    falls = ~decodes & ~stands
    oldest = torch.full((lanes.sequences,), NO_LIMIT, dtype=torch.int64, device=lanes.device)
    oldest.scatter_reduce_(0, sequences, torch.where(falls, cache_positions, NO_LIMIT), "amin")
    lanes.drop(oldest + 1)
    survives = cache_positions <= oldest.index_select(0, sequences)
    fed = (decodes | falls) & survives
    if ends is None:
        ends = _ends(batch, sequences, cache_positions, token_ids)
    codes = looped.codes.new_zeros(len(looped.loops))
    codes[: len(looped.codes)] = looped.codes
    codes = codes.index_select(0, which)
    flags = torch.where(decodes, (codes == MET) * MET_FLAG + (codes == DIVERGED) * DIVERGED_FLAG, flags)
    depths = torch.where(decodes | falls, loops, depths)
    final = loops >= depth
    _remember(batch, rows, torch.where(fed, token_ids, drafts), depths, flags, fed & ~final)
    _enter(batch, torch.where(fed, rows, lanes.count), table, token_ids, ends, fed)
    checked = batch.settings.table[:, columns.VERIFY].index_select(0, sequences) > 0
    emitted = survives & (final | (decodes & ~checked))
    why = torch.where(falls, 0, flags)
    columns_out = [emitted, sequences, token_ids, depths, cache_positions + 1, why, ends, ~falls]
    return torch.stack([column.long() for column in columns_out], dim=1)


def _remember(batch: Batch, rows: Tensor, drafts: Tensor, depths: Tensor, flags: Tensor, where: Tensor) -> None:
    """Notes a new draft with the token that it was read from."""
    lanes = batch.lanes
    at = torch.where(where, rows, lanes.count)
    lanes.table[:, FLAGS - 2 : FLAGS + 1].index_copy_(0, at, torch.stack([drafts, depths, flags], dim=1))


def _ends(batch: Batch, sequences: Tensor, cache_positions: Tensor, token_ids: Tensor) -> Tensor:
    """Whether sequences end with ids `[K]` that follow cache positions `[K]`."""
    settings = batch.settings
    limit = settings.table[:, columns.LIMIT].index_select(0, sequences)
    is_eos = (settings.eos.index_select(0, sequences) == token_ids[:, None]).any(dim=1)
    return is_eos | (cache_positions + 1 >= limit)


def _enter(
    batch: Batch, lanes: Tensor, table: Tensor, token_ids: Tensor, ends: Tensor, fed: Tensor | None = None
) -> None:
    """Feeds ids back, each behind the lane that it was read from; the lane stays idle where the sequence ends."""
    own, following = batch.lanes, batch.lanes.next.index_select(0, lanes)
    stays_out = ends if fed is None else ends | ~fed
    entries = table.clone()
    entries[:, CACHE_POSITION : CACHE_POSITION + 2] += 1
    entries[:, STAGE] = stays_out * own.idle
    entries[:, FLAGS - 2] = NO_DRAFT
    entries[:, FLAGS] = 0
    own.table.index_copy_(0, following, entries)
    own.hidden.index_copy_(0, following, batch.model.enter(token_ids.clamp_min(0), entries[:, CACHE_POSITION + 1]))
    if batch.program.gate or own.exit_state is not None:
        own.forget(following)
