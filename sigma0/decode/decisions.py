"""Which rows of a pass stop: the decision of each row's own rule, and the stage that each is at after it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import RowIndices
from sigma0.decode.lanes import CACHE_POSITION, CUMULATIVE, DIVERGED_FLAG, FLAGS, MET_FLAG, POSITION, STAGE, SURVIVAL
from sigma0.decode.logits import mask_logits
from sigma0.decode.ops import DIVERGED, LAST_LOOP, MET, LoopEndOutput
from sigma0.decode.prefill import Batch, read_rows

# A decision beside those of `sigma0.decode.ops`: a grammar leaves one id, so nothing has to be read.
FORCED = 4


@dataclass(frozen=True)
class Rows:
    """Rows that have run one loop more, `[R]` each; those that decode come first.

    Their lines of the table of lanes, `[R, 6]`, are from before the loop, their states `[R, D]` from after it.
    """

    lanes: Tensor
    table: Tensor
    sequences: Tensor
    loops: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class ExitDecisions:
    """What exit rules say of the decoding rows."""

    # Whether a rule holds, which counts from its first loop on, bool `[L]`; None where no rule is looked at
    met: Tensor | None = None
    decisions: Tensor | None = None  # `MET` or `DIVERGED` of rules over differences, else 0, int64 `[L]`; None for none
    given: Tensor | None = None  # Whether an exit that was given beforehand has come, bool `[L]`; None for none
    logits: Tensor | None = None  # `[L, V]`, or of all rows `[R, V]`, where a rule reads them


def ask_rules(
    batch: Batch, rows: Rows, previous: Tensor, decoding: int, end: LoopEndOutput | None, whole: bool
) -> ExitDecisions:
    """What the rules say of the first L rows, those that decode, at least 1, given all states before `[R, D]`.

    `end` is of the loop, where differences are kept. Under `whole` the head reads all rows at once, since drafts are
    read in this pass too.
    """
    program, ops, settings = batch.program, batch.ops, batch.settings
    sequences, logits, given = rows.sequences[:decoding], None, None
    met = []
    if end is None and program.gate:
        met.append(_gate_met(batch, rows.hidden[:decoding], rows.lanes[:decoding], sequences))
    if program.reads_logits:
        logits = read_first(batch, rows, rows.hidden.shape[0] if whole else decoding)  # [L, V] or [R, V]
    if program.margin:
        assert logits is not None
        met.append(ops.margin_met(logits[:decoding], settings.thresholds[:, columns.THETA].index_select(0, sequences)))
    if program.criteria:
        met.append(_criteria_met(batch, rows, previous, decoding, logits))
    if program.forced:
        assert settings.exits is not None
        first = settings.table[:, columns.PROMPT].index_select(0, sequences)
        token = (rows.table[:decoding, CACHE_POSITION] - first) % settings.exits.shape[1]
        given = rows.loops[:decoding] >= settings.exits[sequences, token]
    decisions = None if end is None else end.decisions[:decoding].long()
    either = None if not met else met[0] if len(met) == 1 else torch.stack(met).any(0)
    met_by, decided, come = (None if part is None else ops.broadcast(part) for part in (either, decisions, given))
    return ExitDecisions(met_by, decided, come, logits)


def stop_codes(batch: Batch, rows: Rows, current: Tensor, ruled: ExitDecisions) -> Tensor:
    """Why each decoding row stops, 0 where it goes on, `[L]`."""
    program, decoding, loops = batch.program, len(current), rows.loops
    last = loops[:decoding] >= current[:, columns.LAST]
    codes = last * LAST_LOOP
    if ruled.decisions is not None:
        codes = codes.masked_fill((ruled.decisions == DIVERGED) & ~last, DIVERGED)
        codes = codes.masked_fill(ruled.decisions == MET, MET)
    if ruled.met is not None:
        codes = codes.masked_fill(ruled.met & (loops[:decoding] >= current[:, columns.MIN_LOOPS]), MET)
    if ruled.given is not None:
        codes = (last * LAST_LOOP).masked_fill(ruled.given, MET)
    if program.masked:
        assert batch.lanes.only is not None
        codes = codes.masked_fill(batch.lanes.only.index_select(0, rows.lanes[:decoding]) >= 0, FORCED)
    if program.verify and program.prompts:
        codes = _hold_prompts(batch, rows.table, rows.lanes, loops, current, codes)
    return codes


def checked(batch: Batch, table: Tensor, sequences: Tensor, loops: Tensor) -> Tensor:
    """Which rows are drafts that are read at the loop that they have just finished, bool `[N]`."""
    stage, depth = table[:, STAGE], batch.lanes.depth
    current = batch.settings.table.index_select(0, sequences)
    at_this_loop = (current[:, columns.REDRAFT] > 0) | (loops == depth)
    return (stage >= depth) & (stage < batch.lanes.idle) & at_this_loop & (current[:, columns.VERIFY] > 0)


def leaves(current: Tensor, table: Tensor, loops: Tensor, codes: Tensor) -> Tensor:
    """Which decoding rows run no loop behind the one at which they stop, bool `[L]`; a prompt's run all that it has."""
    in_answer = table[: len(codes), CACHE_POSITION] >= current[:, columns.PROMPT]
    at_last = loops[: len(codes)] >= current[:, columns.LAST]
    return (codes > 0) & (current[:, columns.DROPS_AT_EXIT] > 0) & (in_answer | at_last)


def read_first(batch: Batch, rows: Rows, count: int) -> Tensor:
    """Logits `[count, V]` of the first rows of a pass: those that decode, and drafts that are checked in it."""
    if not batch.model.stages[1]:
        return masked(batch, batch.model.read(rows.hidden[:count]), rows.lanes[:count])
    table, sequences, loops = rows.table[:count], rows.sequences[:count], rows.loops[:count]
    reads = table[:, STAGE] < batch.lanes.depth
    if batch.program.verify:
        reads = reads | checked(batch, table, sequences, loops)
    indices = RowIndices(sequences, table[:, CACHE_POSITION], table[:, POSITION], loops)
    return masked(batch, read_rows(batch, rows.hidden[:count], indices, reads), rows.lanes[:count])


def masked(batch: Batch, logits: Tensor, lanes: Tensor) -> Tensor:
    """Logits `[K, V]` of rows in lanes `[K]`: of ids that their grammars allow."""
    if not batch.program.masked:
        return logits
    assert batch.lanes.masks is not None
    return mask_logits(logits, batch.lanes.masks.index_select(0, lanes))


def _criteria_met(batch: Batch, rows: Rows, previous: Tensor, decoding: int, logits: Tensor | None) -> Tensor:
    """Whether a criterion is met, bool `[L]`; what it keeps is kept by sequence, of which one token decodes."""
    lanes, settings, kept = batch.lanes, batch.settings, batch.lanes.criteria
    assert kept is not None
    states = previous[:decoding, : lanes.width], rows.hidden[:decoding, : lanes.width]
    sequences = rows.sequences[:decoding]
    mode = settings.table[:, columns.CRITERION].index_select(0, sequences)
    delta = settings.thresholds[:, columns.OWN].index_select(0, sequences)
    slots = torch.where(rows.table[:decoding, STAGE] < lanes.depth, sequences, lanes.sequences)
    read = None if logits is None else logits[:decoding]
    return kept.decide(batch.program.criteria, mode, delta, slots, rows.loops[:decoding] == 1, states, read)


def _gate_met(batch: Batch, hidden: Tensor, lanes: Tensor, sequences: Tensor) -> Tensor:
    """Whether `qexit` is met, bool `[L]`: `kernels.loop_end` where nothing else is kept of a token."""
    hazard = torch.sigmoid(batch.model.gate(hidden).float())
    kept = batch.lanes.gate.index_select(0, lanes)
    survival, cumulative = kept[:, SURVIVAL], kept[:, CUMULATIVE] + hazard * kept[:, SURVIVAL]
    batch.lanes.gate.index_copy_(0, lanes, torch.stack([survival * (1.0 - hazard), cumulative], dim=-1))
    return cumulative >= batch.settings.thresholds[:, columns.Q].index_select(0, sequences)


def _hold_prompts(batch: Batch, table: Tensor, rows: Tensor, loops: Tensor, current: Tensor, codes: Tensor) -> Tensor:
    """Under `verify` the last token of a prompt is read at loop T, and only notes how its rule stood first."""
    decoding, depth = len(codes), batch.lanes.depth
    holds = (current[:, columns.VERIFY] > 0) & (table[:decoding, CACHE_POSITION] < current[:, columns.PROMPT])
    flags = table[:decoding, FLAGS]
    noted = torch.where(codes == MET, MET_FLAG, torch.where(codes == DIVERGED, DIVERGED_FLAG, 0))
    flags = torch.where(holds & (flags == 0), noted, flags)
    batch.lanes.table[:, FLAGS].index_copy_(0, rows[:decoding], flags)
    at_end = torch.where(flags == MET_FLAG, MET, LAST_LOOP) * (loops[:decoding] >= depth)
    return torch.where(holds, at_end, codes)


def advance_stages(batch: Batch, rows: Tensor, table: Tensor, loops: Tensor, current: Tensor, codes: Tensor) -> None:
    """Every row is a loop further; a row that stops only fills its planes from now on, or leaves."""
    lanes, decoding = batch.lanes, codes.shape[0]
    stage = table[:, STAGE] + 1
    if decoding:
        trailing = torch.add(stage[:decoding], codes > 0, alpha=lanes.depth)
        if batch.program.leaves:
            trailing = trailing.masked_fill(leaves(current, table, loops, codes), lanes.idle)
        # which of the two is smaller must not become part of a compiled pass
        if torch.compiler.is_compiling() or decoding < stage.shape[0]:
            stage[:decoding] = trailing
        else:
            stage = trailing
    lanes.table[:, STAGE].index_copy_(0, rows, stage)
