"""A step as one call of fixed shapes: which rows are read is a mask, and nothing is looked at on the host.

A CPU looks at the decisions of a loop for nothing, and then reads the head of the few rows that stop. A device would be
waited for; it reads a fixed number of rows instead, and what was read from the others is written to nobody's lane.
"""

import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.lanes import CACHE_POSITION, STAGE
from sigma0.decode.planes import propagate_past_exits
from sigma0.decode.runner import Choice
from sigma0.decode.settings import Program
from sigma0.decode.step import EMITTED, ENDS, LINE_WIDTH, SEQUENCE, Looped, run_loop, settle, settle_verified
from sigma0.decode.step_batch import Batch
from sigma0.decode.transfer import Ints, PassCounts

# Columns of the last line: rows of the loop, those of them that decoded, rows that had to be read; and after the step
# lanes that are live, and sequences that have some.
ROWS, DECODING, READ, LIVE, SEQUENCES, _COUNTS = range(6)


def whole_step(
    batch: Batch,
    count: int,
    choice: Choice,
    decoding: int | None = None,
    suspends: bool = False,
    entering: int | None = None,
) -> tuple[Tensor, Tensor]:
    """A loop of every live lane, and all that follows from it.

    Args:
        batch: What the step works on. Under `drop` readers pick planes by `placement.exits`; where there are none, K/V
            are copied.
        count: Live lanes, or a bound on them, at most S T.
        choice: How ids are chosen, on the device.
        decoding: Bound on the rows that are to be read, where `count` is no bound; None where it is.
        entering: Bound on the rows that run their first loop; None where `decoding` says nothing else.
        suspends: Whether sequences that end are suspended: the next step may be launched before the host has seen it.

    Returns:
        int64 `[K + 1, 9]`: what the step emits of every row that may have been read, EMITTED and FRESH 0 where it was
        not, and a last line of counts; and the logits of those rows, `[K, V]`.
    """
    lanes, program = batch.lanes, batch.program
    padded = decoding is None
    if entering is None:
        # a sequence has one token that decodes at most
        entering = min(count, lanes.sequences) if decoding is None else decoding
    if program.reads_logits and program.verify:
        # the head reads all rows once where both the rule and the drafts need it
        decoding = count
    elif decoding is None:
        decoding = min(count, lanes.sequences)
    looped = run_loop(batch, count, decoding, padded=padded, bounded=not padded, entering=entering)
    if program.drops:
        _leave(batch, looped)
    reads = _reads(batch, looped, count if program.verify else decoding)  # [K]
    which = torch.arange(len(reads), device=lanes.device)
    rows = torch.where(reads, looped.lanes[: len(reads)], lanes.count)
    own = Looped(
        rows, looped.table, looped.sequences, looped.loops, looped.hidden, looped.codes, looped.logits, None, None
    )
    token_ids, stands, ends, logits = choice.choose(batch, own, which)
    if program.verify:
        lines = settle_verified(batch, own, which, token_ids, stands, ends, reads)
    else:
        lines = settle(batch, own, which, token_ids, ends, reads)
    if suspends:
        over = torch.zeros(lanes.sequences, dtype=torch.int64, device=lanes.device)
        over.scatter_reduce_(0, lines[:, SEQUENCE], lines[:, EMITTED] * lines[:, ENDS], "amax")
        lanes.suspend_where(over > 0)
    return torch.cat([lines, _counted(batch, looped, reads)[None]]), logits


def take_lines(lines: Ints, program: Program, counts: PassCounts) -> tuple[Ints, Ints]:
    """What a step has emitted and fed, `[N, 9]`, and its line of counts, which are added up."""
    lines, counted = lines[:-1], lines[-1]
    rows = int(counted[ROWS])
    counts.passes += rows > 0
    counts.rows += rows
    if program.reads_logits:
        counts.head_rows += int(counted[DECODING])
    if not program.reads_logits or program.verify:
        counts.head_rows += int(counted[READ])
    return lines, counted


def _reads(batch: Batch, looped: Looped, count: int) -> Tensor:
    """Which of the first rows are read, bool `[K]`: those that stop, and drafts that are checked."""
    codes = looped.codes
    if not batch.program.verify:
        return codes > 0
    depth, stage, loops = batch.lanes.depth, looped.table[:count, STAGE], looped.loops[:count]
    stops = torch.nn.functional.pad(codes, (0, count - len(codes))) > 0
    own = batch.settings.table.index_select(0, looped.sequences[:count])
    at_this_loop = (own[:, columns.REDRAFT] > 0) | (loops == depth)
    trails = (stage >= depth) & (stage < batch.lanes.idle)
    return stops | (trails & at_this_loop & (own[:, columns.VERIFY] > 0))


def _leave(batch: Batch, looped: Looped) -> None:
    """Lets readers at loop t take plane min(t, exit) of tokens that run no further (`drop`).

    The exit of every other row is its last plane, which changes nothing.
    """
    lanes, place, decoding = batch.lanes, batch.placement, len(looped.codes)
    sequences, cache_positions = looped.sequences[:decoding], looped.table[:decoding, CACHE_POSITION]
    own = batch.settings.table.index_select(0, sequences)
    leaves = (looped.codes > 0) & (own[:, columns.LEAVES] > 0) & (cache_positions >= own[:, columns.PROMPT])
    planes = torch.where(leaves, looped.loops[:decoding], lanes.depth) - 1
    if batch.ops.copies_exits or place.exits is None:
        positions = torch.where(leaves, place.flat(sequences, cache_positions), place.total - 1)
        propagate_past_exits(batch.layers, positions, planes)
        return
    exits = place.exits
    # rows that are idle may stand at any position, also at one where another token has left
    at = cache_positions.clamp_max(exits.shape[1] - 1).add(sequences, alpha=exits.shape[1])
    exits.view(-1).scatter_reduce_(0, at, planes.to(exits.dtype), "amin")


def _counted(batch: Batch, looped: Looped, reads: Tensor) -> Tensor:
    lanes, stage = batch.lanes, looped.table[:, STAGE]
    live = lanes.table[:-1, STAGE].view(lanes.sequences, lanes.depth) < lanes.idle
    counts = [stage < lanes.idle, stage < lanes.depth, reads, live, live.any(dim=1)]
    return torch.nn.functional.pad(torch.stack([part.sum() for part in counts]), (0, LINE_WIDTH - _COUNTS))
