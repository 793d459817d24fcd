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

from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.finite import BROKEN
from sigma0.decode.lanes import (
    CACHE_POSITION,
    CUMULATIVE,
    DIVERGED_FLAG,
    DRAFT,
    FLAGS,
    FORCED_FLAG,
    MET_FLAG,
    POSITION,
    STAGE,
    SURVIVAL,
)
from sigma0.decode.masks import forbidden, mask_logits
from sigma0.decode.ops import DIVERGED, LAST_LOOP, MET, LoopEndOutput
from sigma0.decode.prefill import Prefill
from sigma0.decode.settings import NO_LIMIT
from sigma0.decode.stages import prefill_coda, prefill_prelude, read_rows, run_prelude
from sigma0.decode.step_batch import Batch

# Columns of what a step emits.
# A decision beside those of `sigma0.decode.ops`: a grammar leaves one id, so nothing has to be read.
FORCED = 4
EMITTED, SEQUENCE, TOKEN, READ_AT, FED_AT, WHY, ENDS, STANDS, FRESH, LINE_WIDTH = range(10)


@dataclass(frozen=True)
class Looped:
    """Rows that have run one loop more; those that decode come first.

    Attributes:
        lanes: Lane of each, `[R]`.
        table: Their lines of the table of lanes, from before the loop, `[R, 6]`.
        sequences: `[R]`.
        loops: Loops that each has finished, `[R]`.
        hidden: `[R, D]`.
        codes: Of the decoding rows: 0 where one goes on, else why it stops (`MET`, `LAST_LOOP`, `DIVERGED`, `FORCED`),
            `[L]`.
        logits: Of the decoding rows `[L, V]`, or of all `[R, V]`; None where the head has not read them.
        statistics: Of the loop, float32 `[R, 8]`, where a kernel has computed them; else None.
        fates: Index into `FATES` of the loop, int32 `[R]`, as `statistics`.
        seen: Whether the host may look at values of this step, and waits for none of them.
    """

    lanes: Tensor
    table: Tensor
    sequences: Tensor
    loops: Tensor
    hidden: Tensor
    codes: Tensor
    logits: Tensor | None
    statistics: Tensor | None
    fates: Tensor | None
    seen: bool = False


def run_loop(
    batch: Batch,
    count: int,
    decoding: int,
    beside: Prefill | None = None,
    padded: bool = False,
    bounded: bool = False,
    entering: int = 0,
) -> Looped:
    """Rows, block and loop end.

    Args:
        batch: Lanes, settings and planes.
        count: R, live lanes, or a bound on them.
        decoding: L, those of them that decode, or a bound on them.
        beside: Prefill that runs a loop in the same pass; None for none.
        padded: Whether both are bounds. Rows past the live ones are idle or suspended lanes then: they are computed
            and written nowhere.
        bounded: Whether L is a bound, and R is not.
        entering: How many of the decoding rows run their first loop, or a bound on it where L is one; read where there
            is a prelude.
    """
    lanes, depth, program = batch.lanes, batch.lanes.depth, batch.program
    # nobody's lane is left out: it has no sequence, and padding writes any stage and position into it
    rows = lanes.table[:-1, STAGE].sort(stable=True).indices[:count]
    table = lanes.table.index_select(0, rows)  # [R, 6]
    stage, cache_positions = table[:, STAGE], table[:, CACHE_POSITION]
    sequences, planes = rows // depth, stage % depth
    previous = lanes.hidden.index_select(0, rows)  # [R, D]
    indices = RowIndices(sequences, cache_positions, table[:, POSITION], planes)
    live = stage < lanes.idle if padded else None
    if batch.model.stages[0] and beside is not None:
        prefill_prelude(batch, beside)
    if batch.model.stages[0] and entering:
        enters = stage[:entering] == 0 if padded or bounded else None
        previous = run_prelude(batch, previous, indices, entering, enters)
    everything = indices if beside is None else beside.behind(indices)
    view = PassRows(batch.layers, batch.placement, everything, batch.ops, batch.longest, live)
    raw = batch.model.loop(previous, view) if beside is None else beside.loop(batch.model, view, previous)
    if batch.model.stages[1] and beside is not None:
        prefill_coda(batch, beside)
    loops = planes + 1
    if live is not None:
        # from here on lanes are only written to
        rows = torch.where(live, rows, lanes.count)
    hidden, end = _loop_end(batch, raw, previous, rows, sequences)
    lanes.hidden.index_copy_(0, rows, hidden)
    if program.paths:
        assert lanes.paths is not None
        path = lanes.path_index(sequences, cache_positions)
        states = hidden if lanes.width == hidden.shape[1] else hidden[:, : lanes.width]
        lanes.paths[path if live is None else torch.where(live, path, len(lanes.paths) - 1), planes] = states
    own = batch.settings.table.index_select(0, sequences[:decoding])  # [L, 10]
    codes, logits = _decide(
        batch,
        previous,
        hidden,
        rows,
        table,
        sequences,
        loops,
        own,
        end,
        program.redrafts and not padded and not bounded,
    )
    if program.masked:
        assert lanes.only is not None
        codes = codes.masked_fill(lanes.only.index_select(0, rows[:decoding]) >= 0, FORCED)
    if program.verify and program.prompts:
        codes = _hold_prompts(batch, table, rows, loops, own, codes)
    if padded or bounded:
        codes = codes.masked_fill(stage[:decoding] >= depth, 0)
    _advance_stages(batch, rows, table, loops, own, codes)
    statistics, fates = (None, None) if end is None else (end.statistics, end.fates)
    seen = not padded and not bounded and lanes.device.type == "cpu"
    return Looped(rows, table, sequences, loops, hidden, codes, logits, statistics, fates, seen)


def run_prefill(batch: Batch, beside: Prefill) -> None:
    """One loop of prefill by itself; before that of the lanes, which read what it writes."""
    none = torch.zeros(0, dtype=torch.int64, device=batch.lanes.device)
    if batch.model.stages[0]:
        prefill_prelude(batch, beside)
    rows = beside.behind(RowIndices(none, none, none, none))
    view = PassRows(batch.layers, batch.placement, rows, batch.ops, batch.longest)
    beside.loop(batch.model, view, batch.lanes.hidden[:0])
    if batch.model.stages[1]:
        prefill_coda(batch, beside)


def _loop_end(
    batch: Batch, raw: Tensor, previous: Tensor, rows: Tensor, sequences: Tensor
) -> tuple[Tensor, LoopEndOutput | None]:
    """Normed states `[R, D]`, and what the loop end says of them, where differences are kept or a kernel runs."""
    if not batch.program.watch and batch.ops.backend == "torch":
        return batch.model.norm(raw), None
    rules, width = batch.settings.rows(batch.program, sequences), batch.lanes.width
    whole = width == raw.shape[1]
    states = (raw, previous) if whole else (raw[:, :width], previous[:, :width])
    end = batch.ops.loop_end(batch.model, *states, batch.lanes.watch(), rows, rules)
    # where rows carry more than their state, a loop ends without a norm
    return end.hidden if whole else raw, end


def _decide(
    batch: Batch,
    previous: Tensor,
    hidden: Tensor,
    rows: Tensor,
    table: Tensor,
    sequences: Tensor,
    loops: Tensor,
    own: Tensor,
    end: LoopEndOutput | None,
    whole: bool,
) -> tuple[Tensor, Tensor | None]:
    """Why each decoding row stops, 0 where it goes on, `[L]`; and the logits `[L, V]` where the rule reads them."""
    program, decoding, logits = batch.program, len(own), None
    last = loops[:decoding] >= own[:, columns.LAST]
    codes = last * LAST_LOOP
    if program.known or not decoding:
        return codes, None
    if program.gate or program.watch or program.reads_logits or program.criteria:
        late = loops[:decoding] >= own[:, columns.MIN_LOOPS]
    if end is not None:
        decisions = end.decisions[:decoding]
        codes = codes.masked_fill((decisions == DIVERGED) & ~last, DIVERGED).masked_fill(decisions == MET, MET)
    elif program.gate:
        met = _gate_met(batch, hidden[:decoding], rows[:decoding], sequences[:decoding])
        codes = codes.masked_fill(met & late, MET)
    if program.reads_logits:
        # where drafts are read in this pass too, all rows at once
        count = len(hidden) if whole else decoding
        logits = _read_first(batch, hidden, rows, table, sequences, loops, count)  # [L, V] or [R, V]
    if program.margin:
        assert logits is not None
        theta = batch.settings.thresholds[:, columns.THETA].index_select(0, sequences[:decoding])
        codes = codes.masked_fill(batch.ops.leads(logits[:decoding], theta) & late, MET)
    if program.criteria:
        met = _criteria_met(batch, (previous, hidden), table, sequences, loops, own, logits)
        codes = codes.masked_fill(met & late, MET)
    if program.forced:
        exits = batch.settings.exits
        assert exits is not None
        token = (table[:decoding, CACHE_POSITION] - own[:, columns.PROMPT]) % exits.shape[1]
        codes = (last * LAST_LOOP).masked_fill(loops[:decoding] >= exits[sequences[:decoding], token], MET)
    return batch.ops.broadcast(codes), logits


def _read_first(
    batch: Batch, hidden: Tensor, lanes: Tensor, table: Tensor, sequences: Tensor, loops: Tensor, count: int
) -> Tensor:
    """Logits `[count, V]` of the first rows of a pass: those that decode, and drafts that are checked in it."""
    if not batch.model.stages[1]:
        return _masked(batch, batch.model.read(hidden[:count]), lanes[:count])
    stage, depth = table[:count, STAGE], batch.lanes.depth
    reads = stage < depth
    if batch.program.verify:
        own = batch.settings.table.index_select(0, sequences[:count])
        at_this_loop = (own[:, columns.REDRAFT] > 0) | (loops[:count] == depth)
        reads = reads | ((stage < batch.lanes.idle) & at_this_loop & (own[:, columns.VERIFY] > 0))
    rows = RowIndices(sequences[:count], table[:count, CACHE_POSITION], table[:count, POSITION], loops[:count])
    return _masked(batch, read_rows(batch, hidden[:count], rows, reads), lanes[:count])


def _masked(batch: Batch, logits: Tensor, lanes: Tensor) -> Tensor:
    """Logits `[K, V]` of rows in lanes `[K]`: of ids that their grammars allow."""
    if not batch.program.masked:
        return logits
    assert batch.lanes.masks is not None
    return mask_logits(logits, batch.lanes.masks.index_select(0, lanes))


def _criteria_met(
    batch: Batch,
    states: tuple[Tensor, Tensor],
    table: Tensor,
    sequences: Tensor,
    loops: Tensor,
    own: Tensor,
    logits: Tensor | None,
) -> Tensor:
    """Whether a criterion is met, bool `[L]`; what it keeps is kept by sequence, of which one token decodes."""
    decoding, lanes = len(own), batch.lanes
    kept = lanes.criteria
    assert kept is not None
    before, after = (state[:decoding, : lanes.width] for state in states)
    sequences = sequences[:decoding]
    slots = torch.where(table[:decoding, STAGE] < lanes.depth, sequences, lanes.sequences)
    delta = batch.settings.thresholds[:, columns.OWN].index_select(0, sequences)
    return kept.decide(
        batch.program.criteria,
        own[:, columns.CRITERION],
        delta,
        slots,
        loops[:decoding] == 1,
        (before, after),
        None if logits is None else logits[:decoding],
    )


def _gate_met(batch: Batch, hidden: Tensor, lanes: Tensor, sequences: Tensor) -> Tensor:
    """Whether `qexit` is met, bool `[L]`: `kernels.loop_end` where nothing else is kept of a token."""
    hazard = torch.sigmoid(batch.model.gate(hidden).float())
    kept = batch.lanes.gate.index_select(0, lanes)
    survival, cumulative = kept[:, SURVIVAL], kept[:, CUMULATIVE] + hazard * kept[:, SURVIVAL]
    batch.lanes.gate.index_copy_(0, lanes, torch.stack([survival * (1.0 - hazard), cumulative], dim=-1))
    return cumulative >= batch.settings.thresholds[:, columns.Q].index_select(0, sequences)


def _hold_prompts(batch: Batch, table: Tensor, rows: Tensor, loops: Tensor, own: Tensor, codes: Tensor) -> Tensor:
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
    lanes, decoding = batch.lanes, codes.shape[0]
    stage = table[:, STAGE] + 1
    if decoding:
        stops = codes > 0
        trailing = torch.add(stage[:decoding], stops, alpha=lanes.depth)
        if batch.program.leaves:
            in_answer = table[:decoding, CACHE_POSITION] >= own[:, columns.PROMPT]
            at_last = loops[:decoding] >= own[:, columns.LAST]
            leaves = stops & (own[:, columns.LEAVES] > 0) & (in_answer | at_last)
            trailing = trailing.masked_fill(leaves, lanes.idle)
        # which of the two is smaller must not become part of a compiled pass
        if torch.compiler.is_compiling() or decoding < stage.shape[0]:
            stage[:decoding] = trailing
        else:
            stage = trailing
    lanes.table[:, STAGE].index_copy_(0, rows, stage)


def read(batch: Batch, looped: Looped, which: Tensor) -> Tensor:
    """Logits `[K, V]` of rows, int64 `[K]`."""
    if looped.logits is not None and (not batch.program.verify or len(looped.logits) == len(looped.loops)):
        return looped.logits.index_select(0, which)
    hidden, lanes = looped.hidden.index_select(0, which), looped.lanes.index_select(0, which)
    if not batch.model.stages[1]:
        if batch.program.masked and looped.seen:
            return _read_unforced(batch, hidden, lanes)
        return _masked(batch, batch.model.read(hidden), lanes)
    table = looped.table.index_select(0, which)
    sequences, loops = looped.sequences.index_select(0, which), looped.loops.index_select(0, which)
    rows = RowIndices(sequences, table[:, CACHE_POSITION], table[:, POSITION], loops)
    # what is only computed to fill up stands in nobody's lane
    return _masked(batch, read_rows(batch, hidden, rows, lanes < batch.lanes.count), lanes)


def _read_unforced(batch: Batch, hidden: Tensor, lanes: Tensor) -> Tensor:
    """As `_masked`, where the host may look: of rows whose grammar leaves one id the head is not read."""
    assert batch.lanes.only is not None
    only = batch.lanes.only.index_select(0, lanes)
    free = (only < 0).nonzero()[:, 0]
    if len(free) == len(only):
        return _masked(batch, batch.model.read(hidden), lanes)
    size = (len(only), int(batch.model.config.vocab_size))
    logits = torch.full(size, forbidden(hidden.dtype), dtype=hidden.dtype)
    logits.scatter_(1, only.clamp_min(0)[:, None], 0.0)
    if len(free):
        read = _masked(batch, batch.model.read(hidden.index_select(0, free)), lanes.index_select(0, free))
        logits = logits.to(read.dtype).index_copy_(0, free, read)
    return logits


def sample_greedy(batch: Batch, logits: Tensor) -> Tensor:
    """The argmax `[K]` of logits, `BROKEN` where they are not finite."""
    best = logits.max(dim=-1)
    return batch.ops.broadcast(torch.where(best.values.isfinite(), best.indices, BROKEN))


def settle(
    batch: Batch,
    looped: Looped,
    which: Tensor,
    token_ids: Tensor,
    ends: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Advance and emit, where no sequence checks drafts: every row that was read stops.

    Args:
        batch: Lanes and settings.
        looped: The rows.
        which: Rows that were read, int64 `[K]`.
        token_ids: What was sampled from each, `[K]`.
        ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.
        live: Which of the K count, bool `[K]`; None where all do.

    Returns:
        int64 `[K, 9]`.
    """
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    if ends is None:
        ends = _ends(batch, sequences, table[:, CACHE_POSITION], token_ids)
    flags = _flags_of(batch, looped, which)
    rows = looped.lanes.index_select(0, which)
    ones = torch.ones_like(flags)
    emitted = ones if live is None else live.long()
    if live is not None:
        rows = torch.where(live, rows, batch.lanes.count)
    _enter(batch, rows, table, token_ids, ends, live)
    loops, fed_at = looped.loops.index_select(0, which), table[:, CACHE_POSITION] + 1
    return torch.stack([emitted, sequences, token_ids, loops, fed_at, flags, ends.long(), ones, emitted], dim=1)


def settle_verified(
    batch: Batch,
    looped: Looped,
    which: Tensor,
    token_ids: Tensor,
    stands: Tensor,
    ends: Tensor | None = None,
    live: Tensor | None = None,
    some_fall: bool = True,
    some_are_new: bool = True,
) -> Tensor:
    """Accept, advance and emit, where some sequence checks drafts.

    Args:
        batch: Lanes and settings.
        looped: The rows.
        which: Rows that were read: those that stop, and drafts that are checked, int64 `[K]`.
        token_ids: What holds for each now: a new id, or the draft where it stands, `[K]`.
        stands: Whether a draft stands, bool `[K]`.
        ends: Whether the sequence ends with it, bool `[K]`; None as the settings say.
        live: Which of the K count, bool `[K]`; None where all do.
        some_fall: False where every draft among them is known to stand.
        some_are_new: False where none of them is known to be new, and none falls.

    Returns:
        int64 `[K, 9]`.
    """
    lanes, depth = batch.lanes, batch.lanes.depth
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    stage, cache_positions, _, _, depths, flags = table.unbind(1)
    loops = looped.loops.index_select(0, which)
    decodes, final = stage < depth, loops >= depth
    survives = torch.ones_like(decodes) if live is None else live
    falls = ~survives
    if some_fall:
        falls = ~(decodes | stands) if live is None else ~(decodes | stands) & live
        survives = survives & _survives(batch, sequences, cache_positions, falls)
    if ends is None:
        ends = _ends(batch, sequences, cache_positions, token_ids)
    fed = falls
    if some_are_new:
        flags = torch.where(decodes, _flags_of(batch, looped, which), flags)
        depths = torch.where(decodes | falls, loops, depths)
        fed = (decodes | falls) & survives
        rows = torch.where(fed, looped.lanes.index_select(0, which), lanes.count)
        # a new draft is noted with the token that it was read from
        drafts = torch.stack([token_ids, depths, flags], dim=1)
        at = torch.where(final, lanes.count, rows)
        lanes.table[:, DRAFT : FLAGS + 1].index_copy_(0, at, drafts)
        _enter(batch, rows, table, token_ids, ends, fed)
    emits = final
    if batch.program.mixed:
        checked = batch.settings.table[:, columns.VERIFY].index_select(0, sequences) > 0
        emits = final | (decodes & ~checked)
    why = torch.where(falls, 0, flags)
    line = [survives & emits, sequences, token_ids, depths, cache_positions + 1, why, ends, ~falls, fed]
    return torch.stack([column.long() for column in line], dim=1)


def _survives(batch: Batch, sequences: Tensor, cache_positions: Tensor, falls: Tensor) -> Tensor:
    """Drops every token behind the oldest draft that falls, in its sequence; which rows are none of them, `[K]`."""
    lanes = batch.lanes
    oldest = torch.full((lanes.sequences,), NO_LIMIT, dtype=torch.int64, device=lanes.device)
    oldest.scatter_reduce_(0, sequences, torch.where(falls, cache_positions, NO_LIMIT), "amin")
    lanes.drop(oldest + 1)
    return cache_positions <= oldest.index_select(0, sequences)


def _flags_of(batch: Batch, looped: Looped, which: Tensor) -> Tensor:
    """Why rows were read where they were, for those that stop in this pass, `[K]`."""
    codes = looped.codes
    if codes.shape[0] < looped.loops.shape[0]:
        codes = torch.nn.functional.pad(codes, (0, looped.loops.shape[0] - codes.shape[0]))
    codes = codes.index_select(0, which)
    flags = (codes == MET) * MET_FLAG + (codes == DIVERGED) * DIVERGED_FLAG
    return flags + (codes == FORCED) * FORCED_FLAG if batch.program.masked else flags


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
    entries = torch.addcmul(own.offset, table, own.kept)
    entries[:, STAGE] = stays_out * own.idle
    own.table.index_copy_(0, following, entries)
    own.hidden.index_copy_(0, following, batch.model.enter(token_ids.clamp_min(0), entries[:, POSITION]))
    if batch.program.gate or own.exit_state is not None:
        own.forget(following)
