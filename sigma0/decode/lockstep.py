"""A forward over a cache, as a caller that chooses the ids itself makes it: what earlier tokens lack is run first.

Before a forward of several tokens the missing K/V of deeper loops are filled; a single token is decoded for every
sequence in lockstep.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.exits import ExitRule
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.lanes import STAGE
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import DIVERGED, MET
from sigma0.decode.planes import READ
from sigma0.decode.prefill import write_coda
from sigma0.decode.runner import EagerRunner
from sigma0.decode.settings import SequenceExit, SequenceSettings
from sigma0.decode.step import read
from sigma0.decode.transfer import Ints, PendingTokens, to_device, to_host


@torch.no_grad()
def enter_pending(model: LoopedModel, cache: DepthCache, attention_mask: Tensor | None) -> None:
    """Puts the pending tokens of a cache before loop 1, unless no later token may attend to them.

    K/V of tokens that the coming forward's mask `[B, S]` masks stay unwritten; None masks none.
    """
    pending = cache.pending
    if pending is None:
        return
    if attention_mask is not None and attention_mask.dim() == 2:
        shown = attention_mask.bool().cpu().numpy()[pending.sequences, pending.cache_positions]
        pending = pending.select(np.flatnonzero(shown))
    cache.pending = pending if len(pending.cache_positions) else None
    if cache.pending is None:
        return
    hidden = _embedded(model, pending)
    lanes = cache.reserve_lanes(model)
    places = pending.sequences, pending.cache_positions, pending.positions
    sequences, cache_positions, positions = (torch.from_numpy(part).to(lanes.device) for part in places)
    wanted = lanes.lane_of(sequences, cache_positions)
    alone = len(np.unique(pending.sequences)) == len(pending.sequences)
    # a prelude and a coda run for tokens that are read; these are not
    if model.stages != (0, 0) or not alone or bool((lanes.table[wanted, STAGE] != lanes.idle).any()):
        catch_up(model, cache)
        return
    cache.pending = None
    cache.reserve_positions(cache.length)
    lanes.enter(wanted, hidden, cache_positions, positions, stage=lanes.depth)


@torch.no_grad()
def catch_up(model: LoopedModel, cache: DepthCache) -> None:
    """Runs every token in flight or pending to full depth before a forward of several; counted as prompt rows."""
    cache.fill_final()
    if cache.lanes is not None:
        cache.lanes.resume()
    flying, pending = cache.in_flight, cache.pending
    cache.pending, parts = None, []
    if flying is not None:
        parts.append((flying.hidden, flying.sequences, flying.cache_positions, flying.positions, flying.loops))
    read = 0 if flying is None else len(flying)
    if pending is not None:
        loops = np.zeros(len(pending.sequences), dtype=np.int64)
        hidden = _embedded(model, pending)
        parts.append((hidden, pending.sequences, pending.cache_positions, pending.positions, loops))
    if not parts:
        return
    hidden = torch.cat([part[0] for part in parts])
    cache.reserve_positions(cache.length)
    rows = RowIndices(*(torch.from_numpy(np.concatenate(column)) for column in list(zip(*parts, strict=True))[1:]))
    # all at once where nothing is encoded
    segments = rows.cache_positions // (cache.segment or cache.length)
    rows = rows.each(lambda column: column.to(hidden.device))
    unread = torch.arange(len(rows.loops), device=hidden.device) >= read
    for segment in sorted(set(segments.tolist())):
        current = (segments == segment).nonzero()[:, 0].to(hidden.device)
        _run_to_full_depth(
            model, cache, hidden.index_select(0, current), rows.select(current), unread.index_select(0, current)
        )
        if cache.segment is not None:
            cache.encode(min((segment + 1) * cache.segment, cache.length))
    if cache.lanes is not None:
        cache.lanes.table[:, STAGE] = cache.lanes.idle


def _embedded(model: LoopedModel, pending: PendingTokens) -> Tensor:
    ids, positions = (torch.from_numpy(part).to(model.device) for part in (pending.token_ids, pending.positions))
    return model.enter(ids, positions)


def _run_to_full_depth(model: LoopedModel, cache: DepthCache, hidden: Tensor, rows: RowIndices, unread: Tensor) -> None:
    """Runs rows `[R, W]` to loop T; of those that nobody has read a coda leaves K/V at loop T, as of a prompt's."""
    assert cache.depth is not None
    layers, placement, ops = cache.planes, cache.placement(cache.length), model.operations
    first = (rows.loops == 0).nonzero()[:, 0]
    if model.stages[0] and len(first):
        view = PassRows(layers, placement, rows.select(first), ops, cache.length)
        entered = model.prelude(hidden.index_select(0, first), view)
        hidden = hidden.index_copy(0, first, entered)
    while len(rows.loops):
        view = PassRows(layers, placement, rows, ops, cache.length)
        hidden = model.norm(model.loop(hidden, view))
        cache.counts.prompt_rows += len(rows.loops)
        goes_on = rows.loops + 1 < cache.depth
        over = (~goes_on & unread).nonzero()[:, 0]
        if model.stages[1] and len(over):
            current, states = rows.select(over), hidden.index_select(0, over)
            if cache.lacks_final:
                # tokens before them left nothing in the plane of full depth
                current = replace(current, loops=torch.full_like(current.loops, READ))
                model.read(states, PassRows(layers, placement, current, ops, cache.length))
            else:
                write_coda(model, layers, placement, states, current, cache.length)
        left = goes_on.nonzero()[:, 0]
        rows = replace(rows.select(left), loops=rows.loops.index_select(0, left) + 1)
        hidden, unread = hidden.index_select(0, left), unread.index_select(0, left)


@torch.no_grad()
def decode_tokens(
    model: LoopedModel, cache: DepthCache, rule: ExitRule, drop: bool, token_ids: Tensor, positions: Ints
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Passes run until the deepest of the tokens has stopped; its deeper loops follow beside later tokens.

    Sequences that have ended only note their token as pending. Under `drop` no loop runs after an exit.

    Returns:
        Logits `[B, V]`, depths, met and diverged `[B]`; zeros for ended sequences.
    """
    batch = len(token_ids)
    if (drop and cache.in_flight is not None) or (cache.segment and cache.length % cache.segment == 0):
        # `drop` has no trailing rows, so those that another setting has left are run to full depth first; and a segment
        # begins when the one before it is encoded
        catch_up(model, cache)
        cache.encode(cache.length)
    going = np.ones(batch, dtype=np.bool_) if cache.ended is None else ~cache.ended
    alive, over, where = np.flatnonzero(going), np.flatnonzero(~going), np.full(batch, cache.length)
    if len(over):
        ids = token_ids.cpu().numpy()
        cache.add_pending(PendingTokens(ids[over], over, where[over], positions[over]))
    runner = _runner(model, cache, rule, drop, batch)
    if model.stages[1]:
        cache.note_coda(rule.reads_at_full_depth)
    at = to_device(np.stack([alive, where[alive], positions[alive]]), runner.lanes.device)
    hidden = model.enter(token_ids.to(model.device).index_select(0, at[0].to(model.device)), at[2])
    runner.lanes.enter(runner.lanes.lane_of(at[0], at[1]), hidden, at[1], at[2])
    cache.extend(int(where.max()) + 1)
    cache.reserve_positions(cache.length)
    if positions.max() >= cache.length:
        # a caller may begin to count anywhere; passes only know how many positions there are
        model.reserve_positions(int(positions.max()) + 1, runner.lanes.hidden)
    return _run(runner, cache, batch)


def _runner(model: LoopedModel, cache: DepthCache, rule: ExitRule, drop: bool, batch: int) -> EagerRunner:
    if cache.depth is None or cache.batch != batch:
        raise ValueError(f"the cache holds {cache.batch} sequences, not {batch}")
    lanes = cache.reserve_lanes(model)
    lanes.resume()
    lanes.stop_decoding()
    settings = SequenceSettings(batch, cache.depth, lanes.device)
    settings.set_exit(range(batch), SequenceExit(rule, drop))
    runner = EagerRunner(model, lanes, settings, cache, cache.counts)
    record = cache.record
    runner.use(settings.program(paths=record is not None))
    if record is not None:
        record.follow(lanes, model.gate, rule, drop)
    return runner


def _run(runner: EagerRunner, cache: DepthCache, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits: Tensor | None = None
    depths = np.zeros(batch, dtype=np.int64)
    met, diverged = np.zeros((2, batch), dtype=np.bool_)
    while runner.live()[1]:
        step = runner.loop(cache.length)
        assert step is not None
        current, looped = step
        row_ids = runner.to_read(looped)
        if cache.record is not None:
            cache.record.after_pass()
        if not len(row_ids):
            continue
        stopped = read(current, looped, row_ids)
        sequences = looped.sequences.index_select(0, row_ids)
        logits = stopped.new_zeros((batch, stopped.shape[1])) if logits is None else logits
        logits[sequences] = stopped
        output = to_host(sequences)
        codes = to_host(looped.codes.index_select(0, row_ids))
        depths[output] = to_host(looped.loops.index_select(0, row_ids))
        met[output], diverged[output] = codes == MET, codes == DIVERGED
    assert logits is not None
    if cache.record is not None:
        alive = np.flatnonzero(depths)
        cache.record.note_read(alive, cache.length - 1, depths[alive])
    reached, by_rule, broken = (torch.from_numpy(array).to(logits.device) for array in (depths, met, diverged))
    return logits, reached, by_rule, broken
