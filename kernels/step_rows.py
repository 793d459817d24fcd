# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""What stands around the layers of a step on a GPU, with the likeliest ids, in three launches of Triton kernels.

    begin_rows     which lanes are rows, by stage and then in their order: their places, settings and states
    best_parts     the likeliest id of each part of a row's logits
    commit_rows    why rows stop, which are read, drafts that fall, what is fed back, kept and emitted

Lanes, settings and lines are those of `sigma0.decode` (`lanes.py`, `settings.py`, `step.py`), whose step in plain torch
is the reference: tables and lines are equal. A row is found by counting the lanes ahead of it, one program a lane. All
that a step decides lies within one sequence, so that T programs of a sequence each decide it for all of its T lanes;
they read what the first launch left of the table, the first writes it anew, and each writes the state of one lane. So
nothing is raced for but sums of integers.

Bytes for each row, of b bytes a number: 4 D b of states, V b of logits, and some 400 of tables.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sigma0.kernels.lane_rows import LaneTables
from sigma0.kernels.row_product import REGISTERS, start
from sigma0.presence import wants_triton

# Numbers of the table of lanes, of settings, thresholds and lines, and of rows ahead of their settings.
TABLE_WIDTH, SETTINGS_WIDTH, THRESHOLDS, LINE_WIDTH, COLUMNS = 6, 11, 3, 9, 7
# Parts of a row of logits; numbers, and lanes, that a program takes at once.
PARTS, BLOCK, LANES = 64, 1024, 1024


class BegunRows(NamedTuple):
    """Rows of a step; those past the live ones are nobody's."""

    tables: LaneTables  # The lanes
    depth: int  # T
    # Lane (nobody's is the last), sequence, cache position, position, plane, position among those of a plane,
    # that of the row's plane (-1 of nobody's), and the settings of its sequence, int64 `[7 + 11, R]`
    columns: Tensor
    thresholds: Tensor  # Of its sequence, float32 `[3, R]`
    previous: Tensor  # Their states, `[R, D]`
    before: Tensor  # The table of lanes as it was, and the row of each lane, int64 `[S T, 7]`
    lines: Tensor  # Room for what is emitted, the last line 0, int64 `[K + 1, 9]`


def begin_rows(
    tables: LaneTables, depth: int, count: int, read: int, blocks: Tensor | None, size: int, total: int
) -> BegunRows:
    """The first `count` lanes by stage, idle and suspended ones last.

    Args:
        tables: The lanes.
        depth: T.
        count: R, a bound on the live lanes, at most S T.
        read: K, those of them that may be read.
        blocks: Block table, int64 `[S, n]`; None where block s is all of sequence s.
        size: Cache positions of a block.
        total: Positions of a plane.
    """
    table, hidden = tables.table, tables.hidden
    lanes, width = len(table) - 1, hidden.shape[1]
    shapes = (COLUMNS + SETTINGS_WIDTH, count), (lanes, TABLE_WIDTH + 1), (read + 1, LINE_WIDTH)
    columns, before, lines = (torch.empty(shape, dtype=torch.int64, device=table.device) for shape in shapes)
    thresholds = torch.empty((THRESHOLDS, count), dtype=torch.float32, device=table.device)
    previous = torch.empty((count, width), dtype=hidden.dtype, device=table.device)
    start(
        _begin_kernel, (lanes,), table, table, tables.settings, tables.thresholds, table if blocks is None else blocks,
        hidden, columns, thresholds, previous, before, lines, lanes, depth, count, read, width, size, total,
        0 if blocks is None else blocks.stride(0), PAGED=blocks is not None, LANES=LANES, BLOCK=BLOCK,
    )  # fmt: skip
    return BegunRows(tables, depth, columns, thresholds, previous, before, lines)


def best_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each of 64 parts of logits `[K, V]`, and its id: float32 and int32 `[K, 64]`.

    The first id of several; NaN counts as infinity, so that it is found.
    """
    values = torch.empty((len(logits), PARTS), dtype=torch.float32, device=logits.device)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    # each begins where loads are wide
    part = triton.cdiv(logits.shape[1], 16 * PARTS) * 16
    options = {"PARTS": PARTS, "BLOCK": BLOCK}
    start(_best_kernel, values.shape, logits, logits, values, ids, logits.shape[1], part, logits.stride(0), **options)
    return values, ids


def commit_rows(
    begun: BegunRows,
    states: Tensor,
    decisions: Tensor,
    met: Tensor | None,
    best: tuple[Tensor, Tensor],
    settled: Tensor | None,
    embedding: Tensor,
    window: int,
    *,
    verify: bool,
    prompts: bool,
    suspends: bool,
) -> tuple[Tensor, Tensor]:
    """Ends the loop of rows, takes ids, and feeds them back; tables are written.

    Args:
        begun: The rows.
        states: After the loop, `[R, D]`.
        decisions: Of the loop's end, int32 `[R]`.
        met: Whether a rule over logits holds, bool `[K]`; None for none.
        best: `best_parts` of the logits of the first K rows.
        settled: Loop from which on a draft stands, as `LaneTables.given`; None to judge it.
        embedding: Of the ids, `[V, D]`.
        window: Cache positions whose paths are kept.
        verify: Whether some drafts are checked.
        prompts: Whether tokens of a prompt run in lanes, which are read at loop T where drafts are checked.
        suspends: Whether sequences that end are suspended.

    Returns:
        `begun.lines`, and the last plane that each row writes, int64 `[R]`: T - 1 where it runs on.
    """
    tables, depth, nothing = begun.tables, begun.depth, begun.before
    exits = torch.empty(len(states), dtype=torch.int64, device=states.device)
    optional = [nothing if part is None else part for part in (tables.paths, tables.given, settled, met)]
    rings = [0 if part is None else part.shape[1] for part in (tables.given, settled)]
    start(
        _settle_kernel, (len(begun.before) // depth, depth), states, tables.table, tables.hidden, tables.gate,
        tables.counts, *optional, tables.settings, tables.eos, begun.before, states, decisions, *best, embedding,
        begun.lines, exits, depth, len(states), len(begun.lines) - 1, states.shape[1], window, tables.eos.shape[1],
        *rings, CHECKS=verify, HOLDS=verify and prompts, SUSPENDS=suspends, PATHS=tables.paths is not None,
        GIVEN=tables.given is not None, SETTLED=settled is not None, RULED=met is not None,
        TURNS=triton.next_power_of_2(depth), PARTS=PARTS, BLOCK=BLOCK, **REGISTERS,
    )  # fmt: skip
    return begun.lines, exits


if wants_triton():
    import triton
    import triton.language as tl

    # A kernel reads no global but a constexpr: columns of tables, settings, lines and counts, and values in them.
    _STAGE, _CACHE_POSITION, _POSITION, _DRAFT, _DEPTH, _FLAGS, _ROW = map(tl.constexpr, range(7))
    _LAST, _MIN_LOOPS, _LEAVES, _VERIFY, _REDRAFT, _LIMIT, _PROMPT = map(tl.constexpr, range(7))
    _EMITTED, _SEQUENCE, _TOKEN, _EXIT_DEPTH, _FED_POSITION, _STOP_FLAGS, _ENDS, _ACCEPTED, _FED = map(
        tl.constexpr, range(9)
    )
    _ROWS, _DECODING, _READ_ROWS, _LIVE, _SEQUENCES = map(tl.constexpr, range(5))
    _MET, _LAST_LOOP, _DIVERGED = map(tl.constexpr, range(1, 4))
    _NO_DRAFT, _NO_LIMIT, _BROKEN, _SUSPENDED = map(tl.constexpr, (-1, 2**62, -1, 4))
    _MET_FLAG, _DIVERGED_FLAG, _COUNTS_WIDTH = map(tl.constexpr, (1, 2, 4))
    _TABLE_WIDTH, _SETTINGS_WIDTH, _LINE_WIDTH = map(tl.constexpr, (TABLE_WIDTH, SETTINGS_WIDTH, LINE_WIDTH))
    _COLUMNS, _THRESHOLDS = map(tl.constexpr, (COLUMNS, THRESHOLDS))
    # Larger than any id.
    _NO_ID = tl.constexpr(2**31 - 1)

    @triton.jit(do_not_specialize=["lanes", "depth", "rows", "read", "size", "total", "blocks_row_stride"])
    def _begin_kernel(
        table_ptr, settings_ptr, thresholds_ptr, blocks_ptr, hidden_ptr, columns_ptr, row_thresholds_ptr, previous_ptr,
        before_ptr, lines_ptr, lanes, depth, rows, read, width, size, total, blocks_row_stride,
        PAGED: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        lane = tl.program_id(0).to(tl.int64)
        idle = 2 * depth
        stage = tl.minimum(tl.load(table_ptr + lane * _TABLE_WIDTH + _STAGE), idle)
        row = tl.full([], 0, tl.int64)
        for first in range(0, lanes, LANES):
            other = first + tl.arange(0, LANES)
            theirs = tl.load(table_ptr + other * _TABLE_WIDTH + _STAGE, mask=other < lanes, other=_NO_LIMIT)
            theirs = tl.minimum(theirs, idle)
            ahead = (theirs < stage) | ((theirs == stage) & (other < lane))
            row += tl.sum((ahead & (other < lanes)).to(tl.int64))
        column = tl.arange(0, 16)
        line = tl.load(table_ptr + lane * _TABLE_WIDTH + column, mask=column < _TABLE_WIDTH, other=0)
        kept = tl.where(column == _ROW, row, line)
        tl.store(before_ptr + lane * (_TABLE_WIDTH + 1) + column, kept, mask=column <= _ROW)
        if lane == 0:
            tl.store(lines_ptr + read * _LINE_WIDTH + column, line * 0, mask=column < _LINE_WIDTH)
        if row < rows:
            owned = stage < idle
            sequence = lane // depth
            plane = stage % depth
            # what is computed to fill up is short
            at = tl.where(owned, tl.load(table_ptr + lane * _TABLE_WIDTH + _CACHE_POSITION), 0)
            position = tl.where(owned, tl.load(table_ptr + lane * _TABLE_WIDTH + _POSITION), 0)
            flat = sequence * size + at
            if PAGED:
                flat = tl.load(blocks_ptr + sequence * blocks_row_stride + at // size) * size + at % size
            to = columns_ptr + row
            tl.store(to, tl.where(owned, lane, lanes))
            tl.store(to + rows, sequence)
            tl.store(to + 2 * rows, at)
            tl.store(to + 3 * rows, position)
            tl.store(to + 4 * rows, plane)
            tl.store(to + 5 * rows, flat)
            tl.store(to + 6 * rows, tl.where(owned, plane * total + flat, -1))
            is_setting = column < _SETTINGS_WIDTH
            setting = tl.load(settings_ptr + sequence * _SETTINGS_WIDTH + column, mask=is_setting, other=0)
            tl.store(to + (_COLUMNS + column) * rows, setting, mask=is_setting)
            is_theirs = column < _THRESHOLDS
            threshold = tl.load(thresholds_ptr + sequence * _THRESHOLDS + column, mask=is_theirs, other=0.0)
            tl.store(row_thresholds_ptr + column * rows + row, threshold, mask=is_theirs)
            for begin in range(0, width, BLOCK):
                index = begin + tl.arange(0, BLOCK)
                state = tl.load(hidden_ptr + lane * width + index, mask=index < width, other=0.0)
                tl.store(previous_ptr + row * width + index, state, mask=index < width)

    @triton.jit
    def _best_kernel(
        logits_ptr, values_ptr, ids_ptr, vocabulary, part, row_stride,
        PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        begin = tl.program_id(1) * part
        end = begin + part
        best = -float("inf")
        best_id = _NO_ID
        for first in range(begin, end, BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = (index < end) & (index < vocabulary)
            x = tl.load(logits_ptr + row * row_stride + index, mask=inside, other=-float("inf")).to(tl.float32)
            x = tl.where(x != x, float("inf"), x)
            highest = tl.max(x)
            # of equal ones the first
            current = tl.min(tl.where((x == highest) & inside, index, _NO_ID))
            best_id = tl.where(highest > best, current, best_id)
            best = tl.maximum(highest, best)
        at = row * PARTS + tl.program_id(1)
        tl.store(values_ptr + at, best)
        tl.store(ids_ptr + at, best_id)

    @triton.jit
    def _turn(position, prompt, count):
        """Where a ring of `count` has the token at a cache position, which may be ahead of the prompt's end."""
        return ((position - prompt) % count + count) % count

    @triton.jit(do_not_specialize=["depth", "rows", "read", "window", "eos_count", "given_count", "settled_count"])
    def _settle_kernel(
        table_ptr, hidden_ptr, gate_ptr, counts_ptr, paths_ptr, given_ptr, settled_ptr, met_ptr, settings_ptr, eos_ptr,
        before_ptr, states_ptr, decisions_ptr, values_ptr, ids_ptr, embedding_ptr, lines_ptr, exits_ptr,
        depth, rows, read, width, window, eos_count, given_count, settled_count,
        CHECKS: tl.constexpr, HOLDS: tl.constexpr, SUSPENDS: tl.constexpr, PATHS: tl.constexpr, GIVEN: tl.constexpr,
        SETTLED: tl.constexpr, RULED: tl.constexpr, TURNS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        sequence = tl.program_id(0).to(tl.int64)
        mine = tl.program_id(1)
        idle = 2 * depth
        turn = tl.arange(0, TURNS)
        there = turn < depth
        lane = sequence * depth + turn
        line = before_ptr + lane * (_TABLE_WIDTH + 1)
        stage = tl.load(line + _STAGE, mask=there, other=_NO_LIMIT)
        at = tl.load(line + _CACHE_POSITION, mask=there, other=0)
        position = tl.load(line + _POSITION, mask=there, other=0)
        draft = tl.load(line + _DRAFT, mask=there, other=0)
        read_at = tl.load(line + _DEPTH, mask=there, other=0)
        flags = tl.load(line + _FLAGS, mask=there, other=0)
        row = tl.load(line + _ROW, mask=there, other=_NO_LIMIT)
        current = settings_ptr + sequence * _SETTINGS_WIDTH
        prompt = tl.load(current + _PROMPT)
        checks = tl.load(current + _VERIFY) > 0
        runs = there & (stage < idle) & (row < rows)
        decodes = runs & (stage < depth)
        loops = stage % depth + 1

        # why rows stop
        last = loops >= tl.load(current + _LAST)
        code = tl.where(last, _LAST_LOOP, 0)
        decision = tl.load(decisions_ptr + row, mask=runs, other=0)
        code = tl.where((decision == _DIVERGED) & ~last, _DIVERGED, code)
        code = tl.where(decision == _MET, _MET, code)
        if RULED:
            met = tl.load(met_ptr + row, mask=decodes & (row < read), other=0) != 0
            code = tl.where(met & (loops >= tl.load(current + _MIN_LOOPS)), _MET, code)
        if GIVEN:
            come = given_ptr + sequence * given_count + _turn(at, prompt, given_count)
            code = tl.where(loops >= tl.load(come, mask=there, other=0), _MET, tl.where(last, _LAST_LOOP, 0))
        noted = flags
        if HOLDS:
            # the last token of a prompt is read at loop T, and only notes how its rule stood first
            holds = decodes & checks & (at < prompt)
            first = tl.where(code == _MET, _MET_FLAG, tl.where(code == _DIVERGED, _DIVERGED_FLAG, 0))
            noted = tl.where(holds & (flags == 0), first, flags)
            ended = tl.where(loops >= depth, tl.where(noted == _MET_FLAG, _MET, _LAST_LOOP), 0)
            code = tl.where(holds, ended, code)
        code = tl.where(decodes, code, 0)
        stops = code > 0
        gone = stops & (tl.load(current + _LEAVES) > 0) & ((at >= prompt) | last)
        following = tl.where(gone, idle, stage + 1 + tl.where(stops, depth, 0))
        reads = stops
        if CHECKS:
            at_this_loop = (tl.load(current + _REDRAFT) > 0) | (loops == depth)
            reads = reads | (runs & (stage >= depth) & checks & at_this_loop)

        # ids, and the drafts that they leave standing
        part = tl.arange(0, PARTS)
        parts = row[:, None] * PARTS + part[None, :]
        chosen = (runs & (row < read))[:, None] & (part < PARTS)[None, :]
        value = tl.load(values_ptr + parts, mask=chosen, other=-float("inf"))
        ids = tl.load(ids_ptr + parts, mask=chosen, other=0)
        highest = tl.max(value, axis=1)
        token = tl.min(tl.where(value == highest[:, None], ids, _NO_ID), axis=1).to(tl.int64)
        token = tl.where(tl.abs(highest) < float("inf"), token, _BROKEN)
        stands = token == draft
        if SETTLED:
            ring = settled_ptr + sequence * settled_count + _turn(at, prompt, settled_count)
            right = tl.load(ring, mask=there, other=0)
            stands = (read_at >= right) | (loops < right)
            token = tl.where(decodes, token, draft)
        after = at + 1
        ends = (after >= tl.load(current + _LIMIT)).to(tl.int32)
        for number in range(eos_count):
            ends = ends | (tl.load(eos_ptr + sequence * eos_count + number) == token).to(tl.int32)
        why = tl.where(code == _MET, _MET_FLAG, tl.where(code == _DIVERGED, _DIVERGED_FLAG, 0)).to(tl.int64)
        emits = reads
        fed = reads
        falls = reads & (stage < 0)
        notes = falls
        fallen = falls
        if CHECKS:
            final = loops >= depth
            falls = reads & ~decodes & ~stands
            oldest = tl.min(tl.where(falls, at, _NO_LIMIT))
            fallen = there & (at > oldest)
            survives = reads & (at <= oldest)
            fed = (decodes | falls) & survives
            notes = fed & ~final
            emits = survives & (final | (decodes & ~checks))
            why = tl.where(decodes, why, flags)
            loops = tl.where(decodes | falls, loops, read_at)

        # the token that enters, of a sequence one at most
        new = tl.max(tl.where(fed, (turn + 1) % depth, -1))
        over = tl.sum(tl.where(fed, ends, 0)) > 0
        is_new = turn == new
        if mine == 0:
            known = tl.where(runs, following, stage)
            known = tl.where(fallen, idle, known)
            known = tl.where(is_new, tl.where(over, idle, 0), known)
            if SUSPENDS:
                suspended = tl.sum(tl.where(emits, ends, 0)) > 0
                known += tl.where(suspended & (known < idle), _SUSPENDED * depth, 0)
            new_at = tl.sum(tl.where(fed, after, 0))
            new_position = tl.sum(tl.where(fed, position + 1, 0))
            to = table_ptr + lane * _TABLE_WIDTH
            tl.store(to + _STAGE, known, mask=there)
            tl.store(to + _CACHE_POSITION, tl.where(is_new, new_at, at), mask=there)
            tl.store(to + _POSITION, tl.where(is_new, new_position, position), mask=there)
            tl.store(to + _DRAFT, tl.where(is_new, _NO_DRAFT, tl.where(notes, token, draft)), mask=there)
            tl.store(to + _DEPTH, tl.where(is_new, 0, tl.where(notes, loops, read_at)), mask=there)
            tl.store(to + _FLAGS, tl.where(is_new, 0, tl.where(notes, why, noted)), mask=there)
            # what exit rules keep of the token before
            tl.store(gate_ptr + lane * 2, 1.0, mask=is_new)
            tl.store(gate_ptr + lane * 2 + 1, 0.0, mask=is_new)
            for column in tl.static_range(_COUNTS_WIDTH):
                tl.store(counts_ptr + lane * _COUNTS_WIDTH + column, 0, mask=is_new)
            output = lines_ptr + row * _LINE_WIDTH
            said = there & (row < read)
            tl.store(output + _EMITTED, emits.to(tl.int64), mask=said)
            tl.store(output + _SEQUENCE, row * 0 + sequence, mask=said)
            tl.store(output + _TOKEN, token, mask=said)
            tl.store(output + _EXIT_DEPTH, loops, mask=said)
            tl.store(output + _FED_POSITION, after, mask=said)
            tl.store(output + _STOP_FLAGS, tl.where(falls, 0, why), mask=said)
            tl.store(output + _ENDS, ends.to(tl.int64), mask=said)
            tl.store(output + _ACCEPTED, (~falls).to(tl.int64), mask=said)
            tl.store(output + _FED, fed.to(tl.int64), mask=said)
            left = tl.where(gone, stage % depth, depth - 1)
            tl.store(exits_ptr + row, left.to(tl.int64), mask=there & (row < rows))
            counts = lines_ptr + read * _LINE_WIDTH
            live = tl.sum((there & (known < idle)).to(tl.int64))
            tl.atomic_add(counts + _ROWS, tl.sum(runs.to(tl.int64)))
            tl.atomic_add(counts + _DECODING, tl.sum(decodes.to(tl.int64)))
            tl.atomic_add(counts + _READ_ROWS, tl.sum(reads.to(tl.int64)))
            tl.atomic_add(counts + _LIVE, live)
            tl.atomic_add(counts + _SEQUENCES, tl.minimum(live, 1))

        # the state of one lane
        ran = tl.sum(tl.where(runs & (turn == mine), 1, 0)) > 0
        my_row = tl.sum(tl.where(runs & (turn == mine), row, 0))
        taken = new == mine
        my_id = tl.maximum(tl.sum(tl.where(fed, token, 0)), 0)
        my_lane = sequence * depth + mine
        kept = tl.sum(tl.where(turn == mine, (sequence * window + at % window) * depth + stage % depth, 0))
        for begin in range(0, width, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            # masks that the width divides keep the loads wide
            state = tl.load(states_ptr + my_row * width + index, mask=index < tl.where(ran, width, 0), other=0.0)
            if PATHS:
                tl.store(paths_ptr + kept * width + index, state, mask=index < tl.where(ran, width, 0))
            fresh = tl.load(embedding_ptr + my_id * width + index, mask=index < tl.where(taken, width, 0), other=0.0)
            written = index < tl.where(ran | taken, width, 0)
            tl.store(hidden_ptr + my_lane * width + index, tl.where(taken, fresh, state), mask=written)
