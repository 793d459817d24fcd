"""Wave decoding: a pass advances every frontier token by one loop.

A token that reaches its exit depth gives its output, and the next token of its sequence enters at loop 1 in the next
pass while the first goes on to T beside it. When position p + 1 runs loop t, position p is at least one loop ahead, so
plane t already holds it: attention at loop t over plane t sees just what a run of all loops sees, and K/V are exact.
Rows at different loops share the block's weights, which a pass reads once for all of them.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sigma0.cache import DepthCache
from sigma0.completion import complete
from sigma0.exits import ExitRule, ExitState
from sigma0.frontier import Bools, Frontier, Ints
from sigma0.pass_rows import LoopedModel, PassRows


@dataclass(frozen=True)
class Exits:
    """Tokens that stopped in one pass.

    Attributes:
        sequences: Batch index, int64 `[N]`.
        depths: Loop at which each was read, from 1, `[N]`.
        met: Whether its rule was met, `[N]`.
        logits: Head of the state that was read, `[N, V]`.
    """

    sequences: Ints
    depths: Ints
    met: Bools
    logits: Tensor


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

    The leaders are the rows that have not given their output yet, at most one for each sequence. They stand in the
    order of the frontier, and `state` holds what the rule remembers of them.

    Attributes:
        model: The looped model.
        cache: Planes and frontier.
        rule: When a token may stop.
        drop: Never run the loops after the exit; their planes become copies of the exit's.
    """

    model: LoopedModel
    cache: DepthCache
    rule: ExitRule
    drop: bool = False
    _leading: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _state: ExitState | None = None
    _parked: Frontier | None = None

    def __post_init__(self) -> None:
        if self.drop:
            # `drop` forgets followers, so those that another setting left behind get their planes first
            complete(self.model, self.cache)
        if self.cache.frontier is not None:
            self._leading = np.zeros(len(self.cache.frontier), dtype=np.bool_)

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
        entrants = Frontier(hidden, sequences, columns, positions, np.zeros(len(sequences), dtype=np.int64))
        fresh = self.rule.start(hidden)
        frontier = self.cache.frontier
        self.cache.frontier = entrants if frontier is None else frontier.concatenate(entrants)
        self._leading = np.concatenate([self._leading, np.ones(len(entrants), dtype=np.bool_)])
        self._state = fresh if self._state is None else self._state.concatenate(fresh)
        self.cache.extend(int(columns.max()) + 1)

    def advance(self) -> Exits | None:
        """Runs one pass; returns the tokens that stopped in it, if any."""
        return self._pass(np.zeros(0, dtype=np.int64))[0]

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
        kept = np.flatnonzero(~gone[self._leading])
        if self._state is not None and len(kept) < self._leading.sum():
            device = frontier.hidden.device
            self._state = self._state.select(torch.from_numpy(kept).to(device)) if len(kept) else None
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

    def _run_block(self) -> int:
        frontier = self.cache.frontier
        assert frontier is not None
        hidden = self.model.norm(self.model.block(frontier.hidden, PassRows(self.cache, frontier)))  # [R, D]
        self.cache.frontier = replace(frontier, hidden=hidden, loops=frontier.loops + 1)
        return len(frontier)

    def _pass(self, read: Ints) -> tuple[Exits | None, Readings | None]:
        """One pass: the tokens that stopped in it, and readings of the rows `read`, followers all."""
        self.cache.counts.passes += 1
        self.cache.counts.rows += self._run_block()
        leaders = np.flatnonzero(self._leading)
        logits = None
        if len(leaders) and self.rule.needs_logits:
            logits = self._head(np.concatenate([leaders, read]))
        stopped, met = self._stop(leaders, logits)
        if logits is not None:
            logits = logits.index_select(0, self._index(np.concatenate([stopped, np.arange(len(read)) + len(leaders)])))
        elif len(stopped) or len(read):
            logits = self._head(np.concatenate([leaders[stopped], read]))
        exits, readings = self._told(leaders[stopped], met, read, logits)
        if exits is not None:
            self._release(leaders, stopped)
        self._retire()
        return exits, readings

    def _index(self, rows: Ints) -> Tensor:
        assert self.cache.frontier is not None
        return torch.from_numpy(rows).to(self.cache.frontier.hidden.device)

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

    def _stop(self, leaders: Ints, logits: Tensor | None) -> tuple[Ints, Bools]:
        """Which of the leaders stop, as indices `[N]` into them, and whether their rule was met, bool `[N]`."""
        frontier = self.cache.frontier
        assert frontier is not None
        if not len(leaders):
            return leaders, np.zeros(0, dtype=np.bool_)
        loops = frontier.loops[leaders]
        met = np.zeros(len(leaders), dtype=np.bool_)
        if self.rule.fixed_depth is None:
            assert self._state is not None
            hidden = self._hidden(leaders)
            gate_logits = self.model.gate(hidden) if self.rule.needs_gate else None  # [N]
            self._state, met_here = self.rule.observe(
                self._state,
                torch.from_numpy(loops).to(hidden.device),
                hidden,
                gate_logits,
                None if logits is None else logits[: len(leaders)],
            )
            met = met_here.cpu().numpy()
        stopped = np.flatnonzero(met | (loops >= self.rule.last_loop))
        return stopped, met[stopped]

    def _told(
        self, stopped: Ints, met: Bools, read: Ints, logits: Tensor | None
    ) -> tuple[Exits | None, Readings | None]:
        """Exits of the rows `stopped` and readings of the rows `read`, given logits `[stopped + read, V]`."""
        frontier = self.cache.frontier
        assert frontier is not None
        if logits is None:
            return None, None
        exits = readings = None
        if len(stopped):
            exits = Exits(frontier.sequences[stopped], frontier.loops[stopped], met, logits[: len(stopped)])
        if len(read):
            readings = Readings(
                frontier.sequences[read], frontier.columns[read], frontier.loops[read], logits[len(stopped) :]
            )
        return exits, readings

    def _release(self, leaders: Ints, stopped: Ints) -> None:
        """The stopped leaders become followers; the rule forgets them."""
        frontier = self.cache.frontier
        assert frontier is not None and self._state is not None
        self._leading[leaders[stopped]] = False
        if len(stopped) == len(leaders):
            self._state = None
        else:
            stays = np.ones(len(leaders), dtype=np.bool_)
            stays[stopped] = False
            self._state = self._state.select(self._index(np.flatnonzero(stays)))
        if self.drop:
            self._copy_down(frontier.select(leaders[stopped]))

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

    def _copy_down(self, stopped: Frontier) -> None:
        """Gives the planes below each exit what a reader there must see: the K/V of plane min(t, e)."""
        depth = self.cache.depth
        assert depth is not None
        missing = depth - stopped.loops  # [N]
        if not missing.any():
            return
        source = np.repeat(np.arange(len(stopped)), missing)
        target = np.concatenate([np.arange(loops, depth) for loops in stopped.loops])
        indices = (stopped.loops[source] - 1, target, stopped.sequences[source], stopped.columns[source])
        on_host = torch.from_numpy(np.stack(indices))  # [4, N]
        by_device: dict[torch.device, Tensor] = {}

        def copied(planes: Tensor) -> Tensor:
            if planes.device not in by_device:
                by_device[planes.device] = on_host.to(planes.device)
            read, write, sequences, columns = by_device[planes.device]
            planes[write, sequences, :, columns] = planes[read, sequences, :, columns]
            return planes

        for planes in self.cache.planes:
            planes.map(copied)
