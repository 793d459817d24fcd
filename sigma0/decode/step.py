"""Wave decoding: a pass advances every frontier token by one loop.

A token that reaches its exit depth gives its output, and the next token of its sequence enters at loop 1 in the next
pass while the first goes on to T beside it. When position p + 1 runs loop t, position p is at least one loop ahead, so
plane t already holds it: attention at loop t over plane t sees just what a run of all loops sees, and K/V are exact.
Rows at different loops share the block's weights, which a pass reads once for all of them.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from sigma0.decode.attention import LoopedModel, PassRows
from sigma0.decode.batch import Bools, Frontier, Ints
from sigma0.decode.catch_up import complete
from sigma0.decode.dropped import copy_down, remember_exits, settle
from sigma0.decode.exits import ExitRule
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.ops import DIVERGED, MET
from sigma0.decode.stats import PathReader, RunRecord
from sigma0.decode.transfer import to_device, to_host

_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Exits:
    """Tokens that stopped in one pass.

    Attributes:
        sequences: Batch index, int64 `[N]`.
        depths: Loop at which each was read, from 1, `[N]`.
        met: Whether its rule was met, `[N]`.
        logits: Head of the state that was read, `[N, V]`.
        diverged: Whether it stopped because its loop diverged, `[N]`.
    """

    sequences: Ints
    depths: Ints
    met: Bools
    logits: Tensor
    diverged: Bools


@dataclass(frozen=True)
class Readings:
    """What the head says, after one pass, of tokens that had stopped before.

    Attributes:
        sequences: Batch index, int64 `[N]`, each sequence's tokens in their order.
        columns: Their columns, `[N]`.
        loops: Loops they have finished, `[N]`.
        logits: Head of their states there, `[N, V]`.
    """

    sequences: Ints
    columns: Ints
    loops: Ints
    logits: Tensor


@dataclass
class Wave:
    """Advances the frontier of a cache.

    The leaders are the rows that have not given their output yet, at most one for each sequence.

    Attributes:
        model: The looped model.
        cache: Planes and frontier.
        rule: When a token may stop.
        drop: Never run the loops after the exit; a reader there takes the exit's plane.
        record: Where every loop of every row is told; None where nobody asks.
        ops: What runs a pass, as the model's backend says.
    """

    model: LoopedModel
    cache: DepthCache
    rule: ExitRule
    drop: bool = False
    record: RunRecord | None = None
    _leading: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _parked: Frontier | None = None
    _reader: PathReader | None = None

    def __post_init__(self) -> None:
        self.ops = self.model.operations
        self._boundary_rule = self.rule.boundary(watch=False)
        if self.record is not None:
            watching = self.rule.boundary(watch=True)
            self._reader = PathReader(self.model.gate, watching)
            # the kernel tells statistics in its one launch; in plain torch they wait, unless the rule needs them itself
            if self.ops.backend == "triton" or self._boundary_rule.watches:
                self._boundary_rule = watching
        # the kernel norms too, and faster; in plain torch the boundary is worth its time only where it says something
        decides = self._boundary_rule.decides_by != "none"
        self._asks_boundary = self._boundary_rule.watches or decides or self.ops.backend == "triton"
        if self.drop and self.cache.frontier is not None:
            # `drop` forgets followers, so those that another setting left behind get their planes first
            complete(self.model, self.cache)
        if self.ops.depth_attention is None:
            settle(self.cache)
        self._adopt_followers()

    def _adopt_followers(self) -> None:
        """Rows that an earlier wave left, or that come with no trajectory: theirs begins anew where it is unknown."""
        frontier, pool = self.cache.frontier, self.cache.slots
        if frontier is not None:
            self._leading = np.zeros(len(frontier), dtype=np.bool_)
            lost = frontier.slots < 0
            if pool.watched != self._boundary_rule.watches:
                lost[:] = True
            slots = frontier.slots.copy()
            slots[lost] = pool.take(int(lost.sum()), slots[~lost], frontier.hidden)
            self.cache.frontier = replace(frontier, slots=slots)
        pool.watched = self._boundary_rule.watches

    @property
    def has_leaders(self) -> bool:
        """Whether any token still has to give its output."""
        return bool(self._leading.any())

    def enter(self, token_ids: Tensor, sequences: Ints, columns: Ints, positions: Ints) -> None:
        """Puts tokens before loop 1; they run it in the next pass.

        Args:
            token_ids: One id for each sequence, int64 `[N]`.
            sequences: Their batch indices, `[N]`, none of which has a leader.
            columns: Their columns in the planes, `[N]`.
            positions: Their positions for rotary embeddings, `[N]`.
        """
        hidden = self.model.embed(token_ids.to(self.model.device))  # [N, D]
        frontier, record = self.cache.frontier, self.record
        used = [rows.slots for rows in (frontier, self._parked) if rows is not None]
        slots = self.cache.slots.take(len(sequences), np.concatenate([*used, _NONE]), hidden)
        entrants = Frontier(hidden, sequences, columns, positions, np.zeros(len(sequences), dtype=np.int64), slots)
        self.cache.frontier = entrants if frontier is None else frontier.concatenate(entrants)
        self._leading = np.concatenate([self._leading, np.ones(len(entrants), dtype=np.bool_)])
        self.cache.extend(int(columns.max()) + 1)
        if record is not None:
            record.open(sequences, columns)

    def advance(self) -> Exits | None:
        """Runs one pass; returns the tokens that stopped in it, if any."""
        return self._pass(_NONE)[0]

    def advance_and_read(self, every_loop: bool) -> tuple[Exits | None, Readings | None]:
        """Runs one pass and reads tokens that had stopped before.

        Args:
            every_loop: Read all of them; else only those that reach loop T.

        Returns:
            The tokens that stopped in this pass, and the readings, if any.
        """
        frontier = self.cache.frontier
        assert frontier is not None
        wanted = ~self._leading
        if not every_loop:
            wanted &= frontier.loops + 1 == self.cache.depth
        return self._pass(np.flatnonzero(wanted))

    def drop_from(self, sequence: int, column: int) -> None:
        """Drops the tokens of a sequence from a column on; what their planes hold is written again."""
        frontier = self.cache.frontier
        if frontier is None:
            return
        gone = (frontier.sequences == sequence) & (frontier.columns >= column)
        if not gone.any():
            return
        self._select(np.flatnonzero(~gone))

    def park(self, sequences: Ints) -> None:
        """Leaves the tokens of ended sequences where they are until `unpark`."""
        frontier = self.cache.frontier
        if frontier is None:
            return
        ended = np.isin(frontier.sequences, sequences)
        assert not (ended & self._leading).any(), "a sequence ended before its token gave its output"
        if ended.any():
            parked = frontier.select(np.flatnonzero(ended))
            self._parked = parked if self._parked is None else self._parked.concatenate(parked)
            self._select(np.flatnonzero(~ended))

    def unpark(self) -> None:
        """Puts parked tokens back into the frontier, once no pass of this wave is to come."""
        if self._parked is not None:
            frontier = self.cache.frontier
            together = self._parked if frontier is None else self._parked.concatenate(frontier)
            self.cache.frontier = together.deepest_first()
            self._leading = np.zeros(len(together), dtype=np.bool_)
            self._parked = None

    def _run_block(self) -> Tensor | None:
        """One loop of every row; its decisions int32 `[R]`, where the states decide anything."""
        cache, frontier = self.cache, self.cache.frontier
        assert frontier is not None
        cache.counts.passes += 1
        cache.counts.rows += len(frontier)
        rows = PassRows(cache, frontier, self.ops)
        raw = self.model.block(frontier.hidden, rows)  # [R, D]
        boundary = decisions = None
        if self._asks_boundary:
            at = rows.on(raw.device)
            assert cache.slots.state is not None
            boundary = self.ops.loop_boundary(
                self.model, raw, frontier.hidden, cache.slots.state, at.slots, self._boundary_rule
            )
            hidden, decisions = boundary.hidden, boundary.decisions
        else:
            hidden = self.model.norm(raw)
        if self.record is not None:
            where = (frontier.sequences, frontier.columns, frontier.loops)
            if boundary is not None and self._boundary_rule.watches:
                self.record.put(boundary, *where)
            else:
                assert self._reader is not None
                self.record.note(hidden, *where, self._reader)
        cache.frontier = replace(frontier, hidden=hidden, loops=frontier.loops + 1)
        return decisions

    def _pass(self, read: Ints) -> tuple[Exits | None, Readings | None]:
        """One pass: the tokens that stopped in it, and readings of the rows `read`, followers all."""
        decisions = self._run_block()
        leaders = np.flatnonzero(self._leading)
        logits = None
        if decisions is not None:
            decisions = decisions.index_select(0, self._index(leaders))
        if len(leaders) and self.rule.needs_logits:
            logits = self._head(np.concatenate([leaders, read]))
            leads = self.ops.leads(logits[: len(leaders)], self.rule.threshold)
            if self.rule.min_loops > 1:
                assert self.cache.frontier is not None
                late = self.cache.frontier.loops[leaders] >= self.rule.min_loops
                leads = leads & to_device(late, leads.device)
            decisions = leads.int() * MET if decisions is None else decisions.masked_fill(leads, MET)
        stopped, met, diverged = self._stop(leaders, decisions)
        if logits is not None:
            logits = logits.index_select(0, self._index(np.concatenate([stopped, np.arange(len(read)) + len(leaders)])))
        elif len(stopped) or len(read):
            logits = self._head(np.concatenate([leaders[stopped], read]))
        exits, readings = self._told(leaders[stopped], met, diverged, read, logits)
        if exits is not None:
            self._release(leaders[stopped])
        self._retire()
        return exits, readings

    def _index(self, rows: Ints) -> Tensor:
        assert self.cache.frontier is not None
        return to_device(rows, self.cache.frontier.hidden.device)

    def _hidden(self, rows: Ints) -> Tensor:
        frontier = self.cache.frontier
        assert frontier is not None
        # rows never repeat, so as many as there are means all of them, though not always in their order
        everyone = len(rows) == len(frontier) and bool((rows == np.arange(len(rows))).all())
        return frontier.hidden if everyone else frontier.hidden.index_select(0, self._index(rows))

    def _head(self, rows: Ints) -> Tensor:
        """Logits `[N, V]` of rows of the frontier: one read of the head's weights for all."""
        self.cache.counts.head_rows += len(rows)
        return self.model.head(self._hidden(rows))

    def _stop(self, leaders: Ints, decisions: Tensor | None) -> tuple[Ints, Bools, Bools]:
        """Which of the leaders stop, as indices `[N]` into them; whether their rule was met, and their loop diverged.

        The one place where a pass waits for the device: what stops decides what the next pass is made of. Under `full`
        and `fixed` the host knows that by itself.
        """
        frontier = self.cache.frontier
        assert frontier is not None
        loops = frontier.loops[leaders]
        met, diverged = np.zeros((2, len(leaders)), dtype=np.bool_)
        if len(leaders) and not self.rule.is_known_beforehand:
            codes = np.zeros(len(leaders)) if decisions is None else to_host(self.ops.agree(decisions))
            if self.rule.fixed_depth is None:
                met = self.rule.met(codes == MET, frontier.sequences[leaders], frontier.columns[leaders], loops)
            diverged = (codes == DIVERGED) & ~met & (loops < self.rule.last_loop)
        stopped = np.flatnonzero(met | diverged | (loops >= self.rule.last_loop))
        return stopped, met[stopped], diverged[stopped]

    def _told(
        self, stopped: Ints, met: Bools, diverged: Bools, read: Ints, logits: Tensor | None
    ) -> tuple[Exits | None, Readings | None]:
        """Exits of the rows `stopped` and readings of the rows `read`, given logits `[stopped + read, V]`."""
        frontier = self.cache.frontier
        assert frontier is not None
        if logits is None:
            return None, None
        exits = readings = None
        if len(stopped):
            exits = Exits(frontier.sequences[stopped], frontier.loops[stopped], met, logits[: len(stopped)], diverged)
        if len(read):
            readings = Readings(
                frontier.sequences[read], frontier.columns[read], frontier.loops[read], logits[len(stopped) :]
            )
        return exits, readings

    def _release(self, stopped: Ints) -> None:
        """The rows become followers; under `drop` they leave, and readers are told of their planes."""
        frontier, depth = self.cache.frontier, self.cache.depth
        assert frontier is not None and depth is not None
        self._leading[stopped] = False
        early = stopped[frontier.loops[stopped] < depth] if self.drop else _NONE
        if len(early):
            at = np.stack([frontier.sequences[early], frontier.columns[early], frontier.loops[early] - 1])
            by_exits = self.ops.depth_attention is not None
            (remember_exits if by_exits else copy_down)(self.cache, *to_device(at, frontier.hidden.device).unbind(0))

    def _retire(self) -> None:
        """Rows at full depth leave; under `drop`, so does every row that has given its output."""
        frontier = self.cache.frontier
        assert frontier is not None and self.cache.depth is not None
        waiting = frontier.loops < self.cache.depth
        if self.drop:
            waiting &= self._leading
        if not waiting.all():
            self._select(np.flatnonzero(waiting))

    def _select(self, rows: Ints) -> None:
        frontier = self.cache.frontier
        assert frontier is not None
        self._leading = self._leading[rows]
        self.cache.frontier = frontier.select(rows) if len(rows) else None
