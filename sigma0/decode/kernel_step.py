"""A step of the likeliest ids on a GPU, but for its layers in a few launches: `sigma0.kernels.step_rows`.

What these kernels do not know (criteria, grammars, draws, preludes and codas, states that are no embedding at first)
`sigma0.decode.step.whole_step` does in torch, in some hundred operations over a few numbers each.
"""

import torch
from torch import Tensor

from sigma0.decode import settings as columns
from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.ops import BegunRows, LaneTables, begin_rows, best_parts, commit_rows, no_broadcast
from sigma0.decode.planes import propagate_past_exits
from sigma0.decode.prefill import Batch


def knows(batch: Batch, is_greedy: bool) -> bool:
    """Whether a step may run here: of whole steps, where the likeliest ids are taken and nothing else is looked at."""
    program, lanes, ops = batch.program, batch.lanes, batch.ops
    if not (ops.step_rows and is_greedy) or ops.broadcast is not no_broadcast or torch.compiler.is_compiling():
        return False
    if program.criteria or program.masked or batch.model.stages != (0, 0) or lanes.width != lanes.hidden.shape[1]:
        return False
    embedding = batch.model.plain_weights().embedding
    return embedding is not None and embedding.dtype is lanes.hidden.dtype and embedding.is_contiguous()


def run_step(batch: Batch, count: int, suspends: bool) -> tuple[Tensor, Tensor]:
    """As `sigma0.decode.step.whole_step`, of what is known here."""
    begun, state = _begin(batch, count), batch.lanes.watch()
    slots, *at, flat, written = begun.columns[: -columns.SETTINGS_WIDTH]
    view = PassRows(batch.layers, batch.placement, RowIndices(*at), batch.ops, batch.longest, written=written)
    raw = (batch.loop or batch.model.loop)(begun.previous, view)
    current = begun.columns[-columns.SETTINGS_WIDTH :].T
    rules = batch.settings.rules(batch.program, current, begun.thresholds[columns.OWN])
    end = batch.ops.loop_end(batch.model, raw, begun.previous, state, slots, rules)
    lines, left, logits = _settle(batch, begun, end.hidden.contiguous(), end.decisions, suspends)
    if batch.program.drops:
        propagate_past_exits(batch.layers, flat, left)
    return lines, logits


def compile_kernels(batch: Batch, count: int, suspends: bool) -> None:
    """Within `compiled_together`: has the kernels of `run_step` compiled, but for those of the layers."""
    begun = _begin(batch, count)
    _settle(batch, begun, begun.previous, torch.zeros(count, dtype=torch.int32, device=batch.lanes.device), suspends)


def _begin(batch: Batch, count: int) -> BegunRows:
    lanes, settings, program, place = batch.lanes, batch.settings, batch.program, batch.placement
    fixed = lanes.table, lanes.hidden, lanes.gate, lanes.watch().counts, lanes.paths if program.paths else None
    given = settings.exits if program.forced else None
    tables = LaneTables(*fixed, settings.table, settings.thresholds, settings.eos, given)
    read = count if program.verify else min(count, lanes.sequences)
    return begin_rows(tables, lanes.depth, count, read, place.blocks, place.size, place.total)


def _settle(
    batch: Batch, begun: BegunRows, states: Tensor, decisions: Tensor, suspends: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines, the last plane that each row writes, and logits of the rows that may be read."""
    program, read = batch.program, len(begun.lines) - 1
    embedding = batch.model.plain_weights().embedding
    assert embedding is not None
    logits = batch.model.read(states[:read])
    met = batch.ops.margin_met(logits, begun.thresholds[columns.THETA, :read]) if program.margin else None
    settled = batch.settings.settled if program.forced else None
    lines, left = commit_rows(
        begun, states, decisions, met, best_parts(logits), settled, embedding, max(batch.lanes.window, 1),
        verify=program.verify, prompts=program.prompts, suspends=suspends,
    )  # fmt: skip
    return lines, left, logits
