"""Wave decoding: a pass advances every token in flight by one loop.

A token that reaches its exit depth emits its output, and the next token of its sequence enters at loop 1 in the next
pass while the first goes on to T beside it. When position p + 1 runs loop t, position p is at least one loop ahead, so
plane t already holds it: attention at loop t over plane t sees just what a run of all loops sees, and K/V are exact.
Rows at different loops share the block's weights, which a pass reads once for all of them.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from sigma0.decode.attention import PassRows
from sigma0.decode.batch import Bools, Ints, RowBatch
from sigma0.decode.catch_up import catch_up, materialize_exits, propagate_past_exit, record_exits
from sigma0.decode.exits import ExitRule
from sigma0.decode.kv_cache import DepthCache
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import DIVERGED, MET
from sigma0.decode.stats import PathReader, RunRecord
from sigma0.decode.transfer import to_device, to_host

_NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Exits:
    """Tokens that stopped in one pass.

    Attributes:
        sequences: Batch index, int64 `[N]`.
        depths: Exit depths, from 1, `[N]`.
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
class TrailingLogits:
    """Logits, after one pass, of tokens that exited in an earlier one.

    Attributes:
        sequences: Batch index, int64 `[N]`, the tokens of a sequence in order.
        cache_positions: Their cache positions, `[N]`.
        loops: Loops they have finished, `[N]`.
        logits: Head of their states there, `[N, V]`.
    """

    sequences: Ints
    cache_positions: Ints
    loops: Ints
    logits: Tensor


@dataclass
class Wave:
    """Advances the in-flight batch of a cache.

    Rows are decoding until their exit, at most one for each sequence, and trailing after it.

    Attributes:
        model: The looped model.
        cache: Planes and in-flight batch.
        rule: When a token may stop.
        drop: Never run the loops after the exit; a reader there takes the exit's plane.
        record: Statistics of every loop of every row; None for none.
        ops: Operations of a pass, for the model's backend.
    """

    model: LoopedModel
    cache: DepthCache
    rule: ExitRule
    drop: bool = False
    record: RunRecord | None = None
    _decoding: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _suspended: RowBatch | None = None
    _reader: PathReader | None = None

    def __post_init__(self) -> None:
        self.ops = self.model.operations
        self._exit_params = self.rule.params(watch=False)
        if self.record is not None:
            watching = self.rule.params(watch=True)
            self._reader = PathReader(self.model.gate, watching)
            # the kernel computes statistics in its launch; in plain torch they are deferred, unless the rule needs them
            if self.ops.backend == "triton" or self._exit_params.watches:
                self._exit_params = watching
        # the kernel norms too, and faster; in plain torch the statistics are computed only where they are needed
        decides = self._exit_params.decides_by != "none"
        self._runs_loop_end = self._exit_params.watches or decides or self.ops.backend == "triton"
        if self.drop and self.cache.in_flight is not None:
            # `drop` has no trailing rows, so those that another setting has left are run to full depth first
            catch_up(self.model, self.cache)
        if self.ops.depth_attention is None:
            materialize_exits(self.cache)
        self._adopt_trailing()

    def _adopt_trailing(self) -> None:
        """Adopts the rows of an earlier wave as trailing; a row without an exit state gets a fresh one."""
        in_flight, pool = self.cache.in_flight, self.cache.exit_states
        if in_flight is not None:
            self._decoding = np.zeros(len(in_flight), dtype=np.bool_)
            lost = in_flight.state_slots < 0
            if pool.watched != self._exit_params.watches:
                lost[:] = True
            state_slots = in_flight.state_slots.copy()
            state_slots[lost] = pool.take(int(lost.sum()), state_slots[~lost], in_flight.hidden)
            self.cache.in_flight = replace(in_flight, state_slots=state_slots)
        pool.watched = self._exit_params.watches

    @property
    def has_decoding(self) -> bool:
        """Whether any token has not exited yet."""
        return bool(self._decoding.any())

    def enter(self, token_ids: Tensor, sequences: Ints, cache_positions: Ints, positions: Ints) -> None:
        """Puts tokens before loop 1; they run it in the next pass.

        Args:
            token_ids: One id for each sequence, int64 `[N]`.
            sequences: Their batch indices, `[N]`, none of which has a decoding row.
            cache_positions: Their cache positions in the planes, `[N]`.
            positions: Their positions for rotary embeddings, `[N]`.
        """
        hidden = self.model.embed(token_ids.to(self.model.device))  # [N, D]
        in_flight, record = self.cache.in_flight, self.record
        used = [rows.state_slots for rows in (in_flight, self._suspended) if rows is not None]
        state_slots = self.cache.exit_states.take(len(sequences), np.concatenate([*used, _NONE]), hidden)
        entrants = RowBatch(
            hidden, sequences, cache_positions, positions, np.zeros(len(sequences), dtype=np.int64), state_slots
        )
        self.cache.in_flight = entrants if in_flight is None else in_flight.concatenate(entrants)
        self._decoding = np.concatenate([self._decoding, np.ones(len(entrants), dtype=np.bool_)])
        self.cache.extend(int(cache_positions.max()) + 1)
        if record is not None:
            record.open(sequences, cache_positions)

    def advance(self) -> Exits | None:
        """Runs one pass; returns the tokens that exit in it, if any."""
        return self._pass(_NONE)[0]

    def advance_with_trailing(self, every_loop: bool) -> tuple[Exits | None, TrailingLogits | None]:
        """Runs one pass, with the logits of trailing rows.

        Args:
            every_loop: Logits of all trailing rows; else only of those that reach loop T.

        Returns:
            The tokens that exit in this pass, and the logits of trailing rows, if any.
        """
        in_flight = self.cache.in_flight
        assert in_flight is not None
        wanted = ~self._decoding
        if not every_loop:
            wanted &= in_flight.loops + 1 == self.cache.depth
        return self._pass(np.flatnonzero(wanted))

    def drop_from(self, sequence: int, cache_position: int) -> None:
        """Drops the tokens of a sequence from a cache position on; their K/V will be overwritten."""
        in_flight = self.cache.in_flight
        if in_flight is None:
            return
        gone = (in_flight.sequences == sequence) & (in_flight.cache_positions >= cache_position)
        if not gone.any():
            return
        self._select(np.flatnonzero(~gone))

    def suspend(self, sequences: Ints) -> None:
        """Takes the rows of ended sequences out of the passes until `resume`."""
        in_flight = self.cache.in_flight
        if in_flight is None:
            return
        ended = np.isin(in_flight.sequences, sequences)
        assert not (ended & self._decoding).any(), "a sequence ended before its token gave its output"
        if ended.any():
            suspended = in_flight.select(np.flatnonzero(ended))
            self._suspended = suspended if self._suspended is None else self._suspended.concatenate(suspended)
            self._select(np.flatnonzero(~ended))

    def resume(self) -> None:
        """Puts suspended rows back into the in-flight batch, after the last pass of this wave."""
        if self._suspended is not None:
            in_flight = self.cache.in_flight
            rows = self._suspended if in_flight is None else self._suspended.concatenate(in_flight)
            self.cache.in_flight = rows.deepest_first()
            self._decoding = np.zeros(len(rows), dtype=np.bool_)
            self._suspended = None

    def _run_block(self) -> Tensor | None:
        """One loop of every row; exit decisions int32 `[R]`, or None where none depends on the states."""
        cache, in_flight = self.cache, self.cache.in_flight
        assert in_flight is not None
        cache.counts.passes += 1
        cache.counts.rows += len(in_flight)
        rows = PassRows(cache, in_flight, self.ops)
        raw = self.model.block(in_flight.hidden, rows)  # [R, D]
        loop_end = decisions = None
        if self._runs_loop_end:
            at = rows.on(raw.device)
            assert cache.exit_states.state is not None
            loop_end = self.ops.loop_end(
                self.model, raw, in_flight.hidden, cache.exit_states.state, at.state_slots, self._exit_params
            )
            hidden, decisions = loop_end.hidden, loop_end.decisions
        else:
            hidden = self.model.norm(raw)
        if self.record is not None:
            where = (in_flight.sequences, in_flight.cache_positions, in_flight.loops)
            if loop_end is not None and self._exit_params.watches:
                self.record.put(loop_end, *where)
            else:
                assert self._reader is not None
                self.record.note(hidden, *where, self._reader)
        cache.in_flight = replace(in_flight, hidden=hidden, loops=in_flight.loops + 1)
        return decisions

    def _pass(self, read: Ints) -> tuple[Exits | None, TrailingLogits | None]:
        """One pass: the tokens that exit in it, and the logits of the trailing rows `read`."""
        decisions = self._run_block()
        decoding = np.flatnonzero(self._decoding)
        logits = None
        if decisions is not None:
            decisions = decisions.index_select(0, self._index(decoding))
        if len(decoding) and self.rule.needs_logits:
            logits = self._head(np.concatenate([decoding, read]))
            leads = self.ops.leads(logits[: len(decoding)], self.rule.threshold)
            if self.rule.min_loops > 1:
                assert self.cache.in_flight is not None
                late = self.cache.in_flight.loops[decoding] >= self.rule.min_loops
                leads = leads & to_device(late, leads.device)
            decisions = leads.int() * MET if decisions is None else decisions.masked_fill(leads, MET)
        stopped, met, diverged = self._stop(decoding, decisions)
        if logits is not None:
            logits = logits.index_select(
                0, self._index(np.concatenate([stopped, np.arange(len(read)) + len(decoding)]))
            )
        elif len(stopped) or len(read):
            logits = self._head(np.concatenate([decoding[stopped], read]))
        exits, trailing = self._outputs(decoding[stopped], met, diverged, read, logits)
        if exits is not None:
            self._release(decoding[stopped])
        self._remove_finished()
        return exits, trailing

    def _index(self, rows: Ints) -> Tensor:
        assert self.cache.in_flight is not None
        return to_device(rows, self.cache.in_flight.hidden.device)

    def _hidden(self, rows: Ints) -> Tensor:
        in_flight = self.cache.in_flight
        assert in_flight is not None
        # rows never repeat: as many as there are, in ascending order, are all of them
        everyone = len(rows) == len(in_flight) and bool((rows == np.arange(len(rows))).all())
        return in_flight.hidden if everyone else in_flight.hidden.index_select(0, self._index(rows))

    def _head(self, rows: Ints) -> Tensor:
        """Logits `[N, V]` of rows of the in-flight batch, in one call of the head."""
        self.cache.counts.head_rows += len(rows)
        return self.model.head(self._hidden(rows))

    def _stop(self, decoding: Ints, decisions: Tensor | None) -> tuple[Ints, Bools, Bools]:
        """Which of the decoding rows exit, as indices `[N]` into them, and whether met or diverged.

        The one place where a pass waits for the device: the exits determine the rows of the next pass. Under `full` and
        `fixed` they are known without it.
        """
        in_flight = self.cache.in_flight
        assert in_flight is not None
        loops = in_flight.loops[decoding]
        met, diverged = np.zeros((2, len(decoding)), dtype=np.bool_)
        if len(decoding) and not self.rule.is_known_beforehand:
            codes = np.zeros(len(decoding)) if decisions is None else to_host(self.ops.broadcast(decisions))
            if self.rule.fixed_depth is None:
                met = self.rule.met(
                    codes == MET, in_flight.sequences[decoding], in_flight.cache_positions[decoding], loops
                )
            diverged = (codes == DIVERGED) & ~met & (loops < self.rule.last_loop)
        stopped = np.flatnonzero(met | diverged | (loops >= self.rule.last_loop))
        return stopped, met[stopped], diverged[stopped]

    def _outputs(
        self, stopped: Ints, met: Bools, diverged: Bools, read: Ints, logits: Tensor | None
    ) -> tuple[Exits | None, TrailingLogits | None]:
        """Exits of the rows `stopped` and trailing logits of the rows `read`, given logits `[stopped + read, V]`."""
        in_flight = self.cache.in_flight
        assert in_flight is not None
        if logits is None:
            return None, None
        exits = trailing = None
        if len(stopped):
            exits = Exits(in_flight.sequences[stopped], in_flight.loops[stopped], met, logits[: len(stopped)], diverged)
        if len(read):
            trailing = TrailingLogits(
                in_flight.sequences[read],
                in_flight.cache_positions[read],
                in_flight.loops[read],
                logits[len(stopped) :],
            )
        return exits, trailing

    def _release(self, stopped: Ints) -> None:
        """Turns exited rows into trailing ones; under `drop` their exits are recorded or propagated instead."""
        in_flight, depth = self.cache.in_flight, self.cache.depth
        assert in_flight is not None and depth is not None
        self._decoding[stopped] = False
        early = stopped[in_flight.loops[stopped] < depth] if self.drop else _NONE
        if len(early):
            at = np.stack([in_flight.sequences[early], in_flight.cache_positions[early], in_flight.loops[early] - 1])
            by_exits = self.ops.depth_attention is not None
            (record_exits if by_exits else propagate_past_exit)(
                self.cache, *to_device(at, in_flight.hidden.device).unbind(0)
            )

    def _remove_finished(self) -> None:
        """Removes rows at full depth; under `drop`, every row that has exited."""
        in_flight = self.cache.in_flight
        assert in_flight is not None and self.cache.depth is not None
        waiting = in_flight.loops < self.cache.depth
        if self.drop:
            waiting &= self._decoding
        if not waiting.all():
            self._select(np.flatnonzero(waiting))

    def _select(self, rows: Ints) -> None:
        in_flight = self.cache.in_flight
        assert in_flight is not None
        self._decoding = self._decoding[rows]
        self.cache.in_flight = in_flight.select(rows) if len(rows) else None
