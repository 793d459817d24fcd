"""One new token for every sequence of a cache, in lockstep: for a caller that chooses the ids itself."""

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.catch_up import catch_up
from sigma0.decode.exits import ExitRule
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import DIVERGED, MET
from sigma0.decode.runner import EagerRunner
from sigma0.decode.settings import SequenceExit, SequenceSettings
from sigma0.decode.step import read
from sigma0.decode.transfer import Ints, PendingTokens, to_device, to_host


@torch.no_grad()
def decode_tokens(
    model: LoopedModel, cache: DepthCache, rule: ExitRule, drop: bool, token_ids: Tensor, positions: Ints
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Passes run until the deepest of the tokens has stopped; its deeper loops follow beside later tokens.

    Args:
        model: The looped model.
        cache: Planes and lanes; sequences that have ended only note their token as pending.
        rule: When a token may stop.
        drop: Never run the loops after the exit.
        token_ids: int64 `[B]`.
        positions: Position of the token in each sequence, `[B]`.

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
    like = model.enter(*torch.zeros((2, 1), dtype=torch.int64, device=model.device))
    lanes = cache.reserve_lanes(like, model.state_width)
    lanes.resume()
    lanes.stop_decoding()
    settings = SequenceSettings(batch, cache.depth, lanes.device)
    settings.set_exit(range(batch), SequenceExit(rule, drop))
    runner = EagerRunner(model, lanes, settings, cache, cache.counts)
    record = cache.record
    runner.use(settings.program(paths=record is not None))
    if record is not None and not record.follows(lanes):
        record.follow(lanes, model.gate, rule, drop)
    return runner


def _run(runner: EagerRunner, cache: DepthCache, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits: Tensor | None = None
    depths = np.zeros(batch, dtype=np.int64)
    met, diverged = np.zeros((2, batch), dtype=np.bool_)
    while runner.live()[1]:
        step = runner.loop(cache.length)
        assert step is not None
        own, looped = step
        which = runner.to_read(looped)
        if cache.record is not None:
            cache.record.after_pass()
        if not len(which):
            continue
        stopped = read(own, looped, which)
        sequences = looped.sequences.index_select(0, which)
        logits = stopped.new_zeros((batch, stopped.shape[1])) if logits is None else logits
        logits[sequences] = stopped
        told = to_host(sequences)
        codes = to_host(looped.codes.index_select(0, which))
        depths[told] = to_host(looped.loops.index_select(0, which))
        met[told], diverged[told] = codes == MET, codes == DIVERGED
    assert logits is not None
    if cache.record is not None:
        alive = np.flatnonzero(depths)
        cache.record.note_read(alive, cache.length - 1, depths[alive])
    tensors = [torch.from_numpy(array).to(logits.device) for array in (depths, met, diverged)]
    return logits, tensors[0], tensors[1], tensors[2]
