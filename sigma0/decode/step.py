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
from sigma0.decode.decisions import FORCED, Rows, Ruled, advance_stages, ask_rules, masked, read_first, stop_codes
from sigma0.decode.finite import BROKEN
from sigma0.decode.lanes import (
    CACHE_POSITION,
    DIVERGED_FLAG,
    DRAFT,
    FLAGS,
    FORCED_FLAG,
    MET_FLAG,
    POSITION,
    STAGE,
)
from sigma0.decode.masks import forbidden
from sigma0.decode.ops import DIVERGED, MET, LaneBooks, LiveRows, LoopEndOutput, Settled, no_broadcast
from sigma0.decode.prefill import Prefill
from sigma0.decode.settings import NO_LIMIT
from sigma0.decode.stages import prefill_coda, prefill_prelude, read_rows, run_prelude
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Ints

# Columns of what a step emits.
EMITTED, SEQUENCE, TOKEN, READ_AT, FED_AT, WHY, ENDS, STANDS, FRESH, LINE_WIDTH = range(10)


@dataclass(frozen=True)
class Looped(Rows):
    """The same rows once it is known which of them stop.

    Attributes:
        codes: Of the decoding rows: 0 where one goes on, else why it stops (`MET`, `LAST_LOOP`, `DIVERGED`,
            `FORCED`), `[L]`.
        logits: Of the decoding rows `[L, V]`, or of all `[R, V]`; None where the head has not read them.
        statistics: Of the loop, float32 `[R, 8]`, where a kernel has computed them; else None.
        fates: Index into `FATES` of the loop, int32 `[R]`, as `statistics`.
        reads: Rows that are to be read, int64 `[K]`, where the books of the lanes have told; else None.
        seen: Whether the host may look at values of this step, and waits for none of them.
    """

    codes: Tensor
    logits: Tensor | None
    statistics: Tensor | None
    fates: Tensor | None
    reads: Tensor | None = None
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
    books = None if padded or bounded or torch.compiler.is_compiling() else batch.books
    owned = enters = None
    live = None
    if books is not None:
        live = books.rows(count)
        table, rows, sequences, cache_positions, positions, planes, loops, previous, _ = live
    else:
        # nobody's lane is left out: it has no sequence, and padding writes any stage and position into it
        rows = lanes.table[:-1, STAGE].sort(stable=True).indices[:count]
        table = lanes.table.index_select(0, rows)  # [R, 6]
        stage, cache_positions, positions = table[:, STAGE], table[:, CACHE_POSITION], table[:, POSITION]
        sequences, planes = rows // depth, stage % depth
        loops = planes + 1
        owned = stage < lanes.idle if padded else None
        enters = stage[:entering] == 0 if padded or bounded else None
        previous = lanes.hidden.index_select(0, rows)  # [R, D]
    indices = RowIndices(sequences, cache_positions, positions, planes)
    if batch.model.stages[0] and beside is not None:
        prefill_prelude(batch, beside)
    if batch.model.stages[0] and entering:
        previous = run_prelude(batch, previous, indices, entering, enters)
    everything = indices if beside is None else beside.behind(indices)
    view = PassRows(batch.layers, batch.placement, everything, batch.ops, batch.longest, owned)
    raw = batch.model.loop(previous, view) if beside is None else beside.loop(batch.model, view, previous)
    if batch.model.stages[1] and beside is not None:
        prefill_coda(batch, beside)
    if books is not None and live is not None:
        return _end_in_books(batch, books, live, raw, previous, decoding)
    if owned is not None:
        # from here on lanes are only written to
        rows = torch.where(owned, rows, lanes.count)
    hidden, end = _loop_end(batch, raw, previous, rows, sequences)
    lanes.hidden.index_copy_(0, rows, hidden)
    if program.paths:
        _keep_paths(batch, hidden, indices, owned)
    ran, ruled = Rows(rows, table, sequences, loops, hidden), Ruled()
    if decoding and not program.known:
        ruled = ask_rules(batch, ran, previous, decoding, end, program.redrafts and not padded and not bounded)
    own = batch.settings.table.index_select(0, sequences[:decoding])  # [L, 11]
    codes = stop_codes(batch, ran, own, ruled)
    if padded or bounded:
        codes = codes.masked_fill(table[:decoding, STAGE] >= depth, 0)
    advance_stages(batch, rows, table, loops, own, codes)
    seen = not padded and not bounded and lanes.device.type == "cpu"
    statistics, fates = (None, None) if end is None else (end.statistics, end.fates)
    return Looped(rows, table, sequences, loops, hidden, codes, ruled.logits, statistics, fates, None, seen)


def _end_in_books(
    batch: Batch, books: LaneBooks, own: LiveRows, raw: Tensor, previous: Tensor, decoding: int
) -> Looped:
    """The loop's end on a CPU, given states behind the block and before it, `[R, D]`."""
    program, end, logits = batch.program, None, None
    checks = program.verify, program.prompts
    alone = batch.ops.broadcast is no_broadcast
    by_gate = program.gate and books.gates and alone and (program.stops_by_gate or program.stops_by_margin)
    asks = decoding > 0 and not (program.known or (by_gate and program.stops_by_gate))
    norms = books.norms and not program.watch
    if not norms:
        raw, end = _loop_end(batch, raw, previous, own.lanes, own.sequences)
    hidden = books.end(raw, norms, by_gate, not asks, *checks)
    if asks:
        rows = Rows(own.lanes, own.lines, own.sequences, own.loops, hidden)
        if alone and program.stops_by_margin and (by_gate or not program.gate):
            logits = read_first(batch, rows, hidden.shape[0] if program.redrafts else decoding)
        if logits is not None and logits.dtype is torch.float32:
            books.lead(logits, by_gate, *checks)
        else:
            ruled = ask_rules(batch, rows, previous, decoding, end, program.redrafts)
            logits = ruled.logits
            books.stop(ruled.met, ruled.decisions, ruled.given, *checks)
    statistics, fates = (None, None) if end is None else (end.statistics, end.fates)
    return Looped(
        own.lanes, own.lines, own.sequences, own.loops, hidden, books.codes, logits, statistics, fates, books.reads,
        True,
    )  # fmt: skip


def _keep_paths(batch: Batch, hidden: Tensor, indices: RowIndices, owned: Tensor | None) -> None:
    """Keeps the states after a loop, `[R, W]`, for statistics."""
    lanes = batch.lanes
    assert lanes.paths is not None
    path = lanes.path_index(indices.sequences, indices.cache_positions)
    if owned is not None:
        path = torch.where(owned, path, len(lanes.paths) - 1)
    lanes.paths[path, indices.loops] = hidden if lanes.width == hidden.shape[1] else hidden[:, : lanes.width]


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


def read(batch: Batch, looped: Looped, which: Tensor) -> Tensor:
    """Logits `[K, V]` of rows, int64 `[K]`."""
    if looped.logits is not None and (not batch.program.verify or looped.logits.shape[0] == looped.loops.shape[0]):
        return looped.logits.index_select(0, which)
    hidden = looped.hidden
    if which is not looped.reads or which.shape[0] < hidden.shape[0]:
        hidden = hidden.index_select(0, which)
    if not (batch.program.masked or batch.model.stages[1]):
        return batch.model.read(hidden)
    lanes = looped.lanes.index_select(0, which)
    if not batch.model.stages[1]:
        return _read_unforced(batch, hidden, lanes) if looped.seen else masked(batch, batch.model.read(hidden), lanes)
    table = looped.table.index_select(0, which)
    sequences, loops = looped.sequences.index_select(0, which), looped.loops.index_select(0, which)
    rows = RowIndices(sequences, table[:, CACHE_POSITION], table[:, POSITION], loops)
    # what is only computed to fill up stands in nobody's lane
    return masked(batch, read_rows(batch, hidden, rows, lanes < batch.lanes.count), lanes)


def _read_unforced(batch: Batch, hidden: Tensor, lanes: Tensor) -> Tensor:
    """As `masked`, where the host may look: of rows whose grammar leaves one id the head is not read."""
    assert batch.lanes.only is not None
    only = batch.lanes.only.index_select(0, lanes)
    free = (only < 0).nonzero()[:, 0]
    if len(free) == len(only):
        return masked(batch, batch.model.read(hidden), lanes)
    size = (len(only), int(batch.model.config.vocab_size))
    logits = torch.full(size, forbidden(hidden.dtype), dtype=hidden.dtype)
    logits.scatter_(1, only.clamp_min(0)[:, None], 0.0)
    if len(free):
        read = masked(batch, batch.model.read(hidden.index_select(0, free)), lanes.index_select(0, free))
        logits = logits.to(read.dtype).index_copy_(0, free, read)
    return logits


def sample_greedy(batch: Batch, logits: Tensor) -> Tensor:
    """The argmax `[K]` of logits, `BROKEN` where they are not finite."""
    if batch.ops.best_rows is not None and logits.dtype is torch.float32 and not torch.compiler.is_compiling():
        return batch.ops.broadcast(batch.ops.best_rows(logits, BROKEN))
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


def settle_in_books(
    batch: Batch, which: Tensor, token_ids: Tensor, stands: Tensor, ends: Tensor | None
) -> tuple[Ints, Ints]:
    """`settle` or `settle_verified` on a CPU, without the lines of drafts that stand before loop T.

    Args:
        batch: Lanes, settings and books.
        which: As `settle_verified` has it; likewise
        token_ids: these,
        stands: these, and
        ends: these.

    Returns:
        The lines, `[K', 9]`, and which of the rows they are about, `[K']`.
    """
    assert batch.books is not None
    return _entered(batch, batch.books.settle(which, token_ids, stands, ends, batch.program.verify))


def settle_best_in_books(batch: Batch, looped: Looped) -> tuple[Ints, Ints, Tensor]:
    """Reads, samples and settles the rows that are to be read, where the likeliest id of each is taken.

    Args:
        batch: Lanes, settings and books.
        looped: The rows.

    Returns:
        The lines, `[K, 9]`, float32 logits `[N, V]`, and which of these the lines are about, `[K]`.
    """
    books, verify, logits = batch.books, batch.program.verify, looped.logits
    assert books is not None and looped.reads is not None
    of_all = logits is not None and (not verify or logits.shape[0] == looped.loops.shape[0])
    if logits is None or not of_all:
        logits = read(batch, looped, looped.reads)
    logits = logits.float()
    lines, kept = _entered(batch, books.settle_best(logits, of_all, BROKEN, verify))
    return lines, looped.reads.numpy()[kept] if of_all else kept, logits


def _entered(batch: Batch, settled: Settled) -> tuple[Ints, Ints]:
    """Embeds what the books have only noted."""
    if settled.fed is not None:
        lanes, token_ids, positions = settled.fed
        batch.lanes.hidden.index_copy_(0, lanes, batch.model.enter(token_ids, positions))
    return settled.lines, settled.kept


def settle_verified(
    batch: Batch,
    looped: Looped,
    which: Tensor,
    token_ids: Tensor,
    stands: Tensor,
    ends: Tensor | None = None,
    live: Tensor | None = None,
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

    Returns:
        int64 `[K, 9]`.
    """
    lanes, depth = batch.lanes, batch.lanes.depth
    table, sequences = looped.table.index_select(0, which), looped.sequences.index_select(0, which)
    stage, cache_positions, _, _, depths, flags = table.unbind(1)
    loops = looped.loops.index_select(0, which)
    decodes, final = stage < depth, loops >= depth
    falls = ~(decodes | stands) if live is None else ~(decodes | stands) & live
    survives = _survives(batch, sequences, cache_positions, falls)
    if live is not None:
        survives = survives & live
    if ends is None:
        ends = _ends(batch, sequences, cache_positions, token_ids)
    flags = torch.where(decodes, _flags_of(batch, looped, which), flags)
    depths = torch.where(decodes | falls, loops, depths)
    fed = (decodes | falls) & survives
    rows = torch.where(fed, looped.lanes.index_select(0, which), lanes.count)
    # a new draft is noted with the token that it was read from
    drafts = torch.stack([token_ids, depths, flags], dim=1)
    lanes.table[:, DRAFT : FLAGS + 1].index_copy_(0, torch.where(final, lanes.count, rows), drafts)
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
