"""A step: every token in flight runs one loop, and what stops is read, judged and fed back.

    rows      the live lanes, decoding ones first; the host knows how many there are, or a bound
    block     one loop of the shared layers; K/V of a row go to the plane of its loop, which it attends to
    loop end  norm, gate, statistics, and the decision of each row's own rule
    read      logits of the rows that stop; under `margin` of all that decode; under `verify` of drafts too
    sample    an id for each row that was read
    accept    under `verify`, the oldest draft that does not stand wins over everything after it
    advance   ids are fed back in the next lane; what has ended is not
    emit      one line for each row that was read

No part of it reads a value of a tensor on the host. Which parts a step has is said by a `Program`, and how many rows by
the caller, so that a step has one fixed shape for each of both.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sigma0.decode import kernel_step
from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.decisions import (
    FORCED,
    ExitDecisions,
    Rows,
    advance_stages,
    ask_rules,
    checked,
    leaves,
    masked,
    stop_codes,
)
from sigma0.decode.lanes import (
    CACHE_POSITION,
    DEPTH,
    DIVERGED_FLAG,
    DRAFT,
    FLAGS,
    FORCED_FLAG,
    MET_FLAG,
    POSITION,
    STAGE,
    Lanes,
)
from sigma0.decode.logits import BROKEN, forbidden
from sigma0.decode.ops import DIVERGED, MET, LoopEndOutput
from sigma0.decode.planes import propagate_past_exits
from sigma0.decode.prefill import Batch, Prefill, prefill_coda, prefill_prelude, read_rows, run_prelude
from sigma0.decode.settings import NO_LIMIT, Program, SequenceSettings
from sigma0.decode.transfer import Ints, PassCounts

# Columns of what a step emits.
EMITTED, SEQUENCE, TOKEN, EXIT_DEPTH, FED_POSITION, STOP_FLAGS, ENDS, ACCEPTED, FED, LINE_WIDTH = range(10)
# Columns of the last line of a whole step: rows of the loop, those of them that decoded, rows that had to be read; and
# after the step lanes that are live, and sequences that have some.
ROWS, DECODING, READ_ROWS, LIVE, SEQUENCES, _COUNTS = range(6)


@dataclass(frozen=True)
class LoopOutput(Rows):
    """The same rows once it is known which of them stop."""

    # Of the decoding rows: 0 where one goes on, else why it stops (`MET`, `LAST_LOOP`, `DIVERGED`, `FORCED`),
    # `[L]`
    codes: Tensor
    # Which rows are to be read, those that stop and drafts that are checked: bool `[L]`, or `[R]` where some
    # sequence checks drafts
    reads: Tensor
    logits: Tensor | None  # Of the decoding rows `[L, V]`, or of all `[R, V]`; None where the head has not read them
    seen: bool = False  # Whether the host may look at values of this step, and waits for none of them


def run_loop(
    batch: Batch, count: int, decoding: int, entering: int, beside: Prefill | None = None, padded: bool = False
) -> LoopOutput:
    """Rows, block and loop end.

    Args:
        batch: Lanes, settings and planes.
        count: R, live lanes, or a bound on them.
        decoding: L, those of them that decode, or a bound on them.
        entering: How many of those run their first loop, or a bound on them; read where there is a prelude.
        beside: Prefill that runs a loop in the same pass; None for none.
        padded: Whether these are bounds. Rows past the live ones are idle or suspended lanes then: they are computed
            and written nowhere.
    """
    lanes, depth, program = batch.lanes, batch.lanes.depth, batch.program
    # nobody's lane is left out: it has no sequence, and padding writes any stage and position into it
    rows = lanes.table[:-1, STAGE].sort(stable=True).indices[:count]
    table = lanes.table.index_select(0, rows)  # [R, 6]
    stage, cache_positions, positions = table[:, STAGE], table[:, CACHE_POSITION], table[:, POSITION]
    sequences, planes = rows // depth, stage % depth
    loops = planes + 1
    owned = stage < lanes.idle if padded else None
    enters = stage[:entering] == 0 if padded else None
    previous = lanes.hidden.index_select(0, rows)  # [R, D]
    indices = RowIndices(sequences, cache_positions, positions, planes)
    previous, raw = run_block(batch, previous, indices, beside, owned, entering, enters)
    if owned is not None:
        # from here on lanes are only written to
        rows = torch.where(owned, rows, lanes.count)
    hidden, end = _loop_end(batch, raw, previous, rows, sequences)
    lanes.hidden.index_copy_(0, rows, hidden)
    if program.paths:
        _keep_paths(batch, hidden, indices, owned)
    ran, ruled = Rows(rows, table, sequences, loops, hidden), ExitDecisions()
    if decoding and not program.known:
        ruled = ask_rules(batch, ran, previous, decoding, end, program.redrafts and not padded)
    current = batch.settings.table.index_select(0, sequences[:decoding])  # [L, 11]
    codes = stop_codes(batch, ran, current, ruled)
    if padded:
        codes = codes.masked_fill(table[:decoding, STAGE] >= depth, 0)
    advance_stages(batch, rows, table, loops, current, codes)
    reads = codes > 0
    if program.verify:
        reads = checked(batch, table, sequences, loops)
        reads[:decoding] |= codes > 0
    seen = not padded and lanes.device.type == "cpu"
    return LoopOutput(rows, table, sequences, loops, hidden, codes, reads, ruled.logits, seen)


def run_block(
    batch: Batch,
    hidden: Tensor,
    indices: RowIndices,
    beside: Prefill | None = None,
    owned: Tensor | None = None,
    entering: int = 0,
    enters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States `[R, W]` ahead of the shared block, after a prelude, and after it, before the loop's norm.

    `beside` is as `run_loop` takes it, `owned` says which rows are somebody's, bool `[R]`, and `enters` which of the
    first `entering` rows run their first loop, bool `[entering]`; None of either where all do.
    """
    prelude, coda = batch.model.stages
    if prelude and beside is not None:
        prefill_prelude(batch, beside)
    if prelude and entering:
        hidden = run_prelude(batch, hidden, indices, entering, enters)
    rows = indices if beside is None else beside.behind(indices)
    view = PassRows(batch.layers, batch.placement, rows, batch.ops, batch.longest, owned)
    loop = batch.loop or batch.model.loop
    raw = loop(hidden, view) if beside is None else beside.loop(batch.model, view, hidden)
    if coda and beside is not None:
        prefill_coda(batch, beside)
    return hidden, raw


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
    run_block(batch, batch.lanes.hidden[:0], RowIndices(none, none, none, none), beside)


def _loop_end(
    batch: Batch, raw: Tensor, previous: Tensor, rows: Tensor, sequences: Tensor
) -> tuple[Tensor, LoopEndOutput | None]:
    """Normed states `[R, D]`, and what the loop end says of them, where differences are kept or a kernel runs."""
    if not batch.program.watch and batch.ops.backend == "torch":
        return batch.norm(raw), None
    rules, width = batch.settings.rows(batch.program, sequences), batch.lanes.width
    whole = width == raw.shape[1]
    states = (raw, previous) if whole else (raw[:, :width], previous[:, :width])
    end = batch.ops.loop_end(batch.model, *states, batch.lanes.watch(), rows, rules)
    # where rows carry more than their state, a loop ends without a norm
    return end.hidden if whole else raw, end


# Of K rows that were read: ids int64 `[K]`; which drafts stand, bool `[K]`; which sequences end by criteria, bool
# `[K]`, None where the settings alone say it; and the logits `[K, V]`.
Sampled = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Sampler(Protocol):
    """Chooses ids for the rows of a step."""

    on_device: bool = False  # Whether nothing but tensors takes part
    is_greedy: bool = False  # Whether the likeliest id of each row is taken, and nothing is looked at but logits
    fixed: Hashable = None  # What a compiled choice takes for constant
    tensors: tuple[Tensor, ...] = ()  # Those that it reads and writes

    def choose(self, batch: Batch, looped: LoopOutput, row_ids: Tensor) -> Sampled:
        """What is read from the rows `row_ids`, int64 `[K]`, of a pass."""


def whole_step(batch: Batch, count: int, sampler: Sampler, suspends: bool = False) -> tuple[Tensor, Tensor]:
    """A step as one call of fixed shapes: which rows are read is a mask, and nothing is looked at on the host.

    A CPU looks at the decisions of a loop for nothing, and then reads the head of the few rows that stop. A device
    would be waited for; it reads a fixed number of rows instead, and what was read from the others is written to
    nobody's lane.

    Args:
        batch: What the step works on.
        count: Live lanes, or a bound on them, at most S T.
        sampler: How ids are chosen, on the device.
        suspends: Whether sequences that end are suspended: the next step may be launched before the host has seen it.

    Returns:
        int64 `[K + 1, 9]`: what the step emits of every row that may have been read, EMITTED and FED 0 where it was
        not, and a last line of counts; and the logits of those rows, `[K, V]`.
    """
    lanes, program = batch.lanes, batch.program
    if kernel_step.knows(batch, sampler.is_greedy):
        return kernel_step.run_step(batch, count, suspends)
    # a sequence has one token that decodes at most; the head reads all rows once where the rule and drafts need it
    entering = min(count, lanes.sequences)
    decoding = count if program.reads_logits and program.verify else entering
    looped = run_loop(batch, count, decoding, entering, padded=True)
    if program.drops:
        _leave(batch, looped)
    reads = looped.reads  # [K]
    row_ids = torch.arange(len(reads), device=lanes.device)
    current = replace(looped, lanes=torch.where(reads, looped.lanes[: len(reads)], lanes.count))
    token_ids, stands, ends, logits = sampler.choose(batch, current, row_ids)
    lines = commit(batch, current, row_ids, token_ids, stands, ends, reads)
    if suspends:
        over = torch.zeros(lanes.sequences, dtype=torch.int64, device=lanes.device)
        over.scatter_reduce_(0, lines[:, SEQUENCE], lines[:, EMITTED] * lines[:, ENDS], "amax")
        lanes.suspend_where(over > 0)
    return torch.cat([lines, _counted(batch, looped)[None]]), logits


def take_lines(lines: Ints, program: Program, counts: PassCounts) -> tuple[Ints, Ints]:
    """What a step has emitted and fed, `[N, 9]`, and its line of counts, which are added up."""
    lines, counted = lines[:-1], lines[-1]
    rows = int(counted[ROWS])
    counts.passes += rows > 0
    counts.rows += rows
    if program.reads_logits:
        counts.head_rows += int(counted[DECODING])
    if not program.reads_logits or program.verify:
        counts.head_rows += int(counted[READ_ROWS])
    return lines, counted


def exits_of(lanes: Lanes, settings: SequenceSettings, looped: LoopOutput) -> tuple[Tensor, Tensor]:
    """Which decoding rows run no further, bool `[L]`, and the last plane that each writes, int64 `[L]`."""
    decoding = looped.codes.shape[0]
    current = settings.table.index_select(0, looped.sequences[:decoding])
    gone = leaves(current, looped.table, looped.loops, looped.codes)
    return gone, torch.where(gone, looped.loops[:decoding], lanes.depth) - 1


def _leave(batch: Batch, looped: LoopOutput) -> None:
    """Copies K/V of tokens that run no further to the deeper planes (`drop`); of other rows nobody's, to its own."""
    place, (gone, planes) = batch.placement, exits_of(batch.lanes, batch.settings, looped)
    sequences, cache_positions = looped.sequences[: len(gone)], looped.table[: len(gone), CACHE_POSITION]
    positions = torch.where(gone, place.flat(sequences, cache_positions), place.total - 1)
    propagate_past_exits(batch.layers, positions, planes)


def _counted(batch: Batch, looped: LoopOutput) -> Tensor:
    lanes, stage = batch.lanes, looped.table[:, STAGE]
    live = lanes.table[:-1, STAGE].view(lanes.sequences, lanes.depth) < lanes.idle
    counts = [stage < lanes.idle, stage < lanes.depth, looped.reads, live, live.any(dim=1)]
    return torch.nn.functional.pad(torch.stack([part.sum() for part in counts]), (0, LINE_WIDTH - _COUNTS))


def read(batch: Batch, looped: LoopOutput, row_ids: Tensor) -> Tensor:
    """Logits `[K, V]` of distinct rows in their order, int64 `[K]`."""
    if looped.logits is not None and (not batch.program.verify or looped.logits.shape[0] == looped.loops.shape[0]):
        return looped.logits.index_select(0, row_ids)
    hidden = looped.hidden
    if row_ids.shape[0] < hidden.shape[0]:
        hidden = hidden.index_select(0, row_ids)
    if not (batch.program.masked or batch.model.stages[1]):
        return batch.model.read(hidden)
    lanes = looped.lanes.index_select(0, row_ids)
    if not batch.model.stages[1]:
        return _read_unforced(batch, hidden, lanes) if looped.seen else masked(batch, batch.model.read(hidden), lanes)
    table = looped.table.index_select(0, row_ids)
    sequences, loops = looped.sequences.index_select(0, row_ids), looped.loops.index_select(0, row_ids)
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
    if batch.ops.argmax_rows is not None and logits.dtype is torch.float32 and not torch.compiler.is_compiling():
        return batch.ops.broadcast(batch.ops.argmax_rows(logits, BROKEN))
    best = logits.max(dim=-1)
    return batch.ops.broadcast(torch.where(best.values.isfinite(), best.indices, BROKEN))


def commit(
    batch: Batch,
    looped: LoopOutput,
    row_ids: Tensor,
    token_ids: Tensor,
    stands: Tensor,
    ends: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """Accept, advance and emit. Where no sequence checks drafts, every row that was read stops, and nothing falls.

    Args:
        batch: Lanes and settings.
        looped: The rows.
        row_ids: Rows that were read: those that stop, and drafts that are checked, int64 `[K]`.
        token_ids: What holds for each now, as in `Sampled`: a new id, or the draft where it stands.
        stands: Likewise; of any dtype where none is checked.
        ends: Likewise.
        live: Which of the K count, bool `[K]`; None where all do.

    Returns:
        int64 `[K, 9]`.
    """
    lanes, depth, current = batch.lanes, batch.lanes.depth, looped.lanes.index_select(0, row_ids)
    table, sequences = looped.table.index_select(0, row_ids), looped.sequences.index_select(0, row_ids)
    cache_positions, depths = table[:, CACHE_POSITION], looped.loops.index_select(0, row_ids)
    flags = _flags_of(batch, looped, row_ids)
    if ends is None:
        ends = _ends(batch, sequences, cache_positions, token_ids)
    if not batch.program.verify:
        fed, kept = live, torch.ones_like(flags)
        emitted = kept if live is None else live.long()
        entered = emitted
        rows = current if live is None else torch.where(live, current, lanes.count)
    else:
        decodes, final = table[:, STAGE] < depth, depths >= depth
        falls = ~(decodes | stands) if live is None else ~(decodes | stands) & live
        survives = _survives(batch, sequences, cache_positions, falls)
        if live is not None:
            survives = survives & live
        fed = (decodes | falls) & survives
        rows = torch.where(fed, current, lanes.count)
        flags = torch.where(decodes, flags, table[:, FLAGS])
        depths = torch.where(decodes | falls, depths, table[:, DEPTH])
        # a new draft is noted with the token that it was read from
        drafts = torch.stack([token_ids, depths, flags], dim=1)
        lanes.table[:, DRAFT : FLAGS + 1].index_copy_(0, torch.where(final, lanes.count, rows), drafts)
        flags = torch.where(falls, 0, flags)
        if batch.program.mixed:
            checks = batch.settings.table[:, columns.VERIFY].index_select(0, sequences) > 0
            final = final | (decodes & ~checks)
        emitted, kept, entered = (part.long() for part in (survives & final, ~falls, fed))
    _enter(batch, rows, table, token_ids, ends, fed)
    lines = [emitted, sequences, token_ids, depths, cache_positions + 1, flags, ends.long(), kept, entered]
    return torch.stack(lines, dim=1)


def _survives(batch: Batch, sequences: Tensor, cache_positions: Tensor, falls: Tensor) -> Tensor:
    """Drops every token after the oldest draft that falls, in its sequence; which rows are none of them, `[K]`."""
    lanes = batch.lanes
    oldest = torch.full((lanes.sequences,), NO_LIMIT, dtype=torch.int64, device=lanes.device)
    oldest.scatter_reduce_(0, sequences, torch.where(falls, cache_positions, NO_LIMIT), "amin")
    lanes.drop(oldest + 1)
    return cache_positions <= oldest.index_select(0, sequences)


def _flags_of(batch: Batch, looped: LoopOutput, row_ids: Tensor) -> Tensor:
    """Why rows were read where they were, for those that stop in this pass, `[K]`."""
    codes = looped.codes
    if codes.shape[0] < looped.loops.shape[0]:
        codes = torch.nn.functional.pad(codes, (0, looped.loops.shape[0] - codes.shape[0]))
    codes = codes.index_select(0, row_ids)
    flags = (codes == MET) * MET_FLAG + (codes == DIVERGED) * DIVERGED_FLAG
    return flags + (codes == FORCED) * FORCED_FLAG if batch.program.masked else flags


def _ends(batch: Batch, sequences: Tensor, cache_positions: Tensor, token_ids: Tensor) -> Tensor:
    """Whether sequences end with ids `[K]` that follow cache positions `[K]`."""
    settings = batch.settings
    limit = settings.table[:, columns.LIMIT].index_select(0, sequences)
    is_eos = (settings.eos.index_select(0, sequences) == token_ids[:, None]).any(dim=1)
    return is_eos | (cache_positions + 1 >= limit)


def _enter(batch: Batch, lanes: Tensor, table: Tensor, token_ids: Tensor, ends: Tensor, fed: Tensor | None) -> None:
    """Feeds ids back, each after the lane that it was read from; the lane stays idle where the sequence ends."""
    current, following = batch.lanes, batch.lanes.next.index_select(0, lanes)
    stays_out = ends if fed is None else ends | ~fed
    entries = torch.addcmul(current.offset, table, current.kept)
    entries[:, STAGE] = stays_out * current.idle
    current.table.index_copy_(0, following, entries)
    current.hidden.index_copy_(0, following, batch.model.enter(token_ids.clamp_min(0), entries[:, POSITION]))
    if batch.program.gate or current.exit_state is not None:
        current.forget(following)
