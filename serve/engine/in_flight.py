"""In-flight batch: add, step, suspend and remove token rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sigma0.decode.batch import Ints
from sigma0.decode.paged_kv import PagedPlanes
from sigma0.decode.paged_step import Passed, Passes, Ruled
from sigma0.decode.rows import FOLLOWER, PASSIVE, Rows, join
from sigma0.decode.transfer import to_device
from sigma0.serve.engine.messages import ServedModel
from sigma0.serve.engine.request import RequestState
from sigma0.serve.engine.scheduler import Scheduler

_NONE: Ints = np.zeros(0, dtype=np.int64)


class InFlightBatch:
    """Rows of all running requests.

    Args:
        model: The looped model.
        planes: Paged K/V.
        scheduler: Registers blocks that are complete.
        slots: Number of batch slots.

    Attributes:
        rows: Rows of the next pass; None where there are none.
        states: Request of each batch slot; None where the slot is free.
        passes: Passes so far.
        rows_run: Rows in them.
    """

    def __init__(self, model: ServedModel, planes: PagedPlanes, scheduler: Scheduler, slots: int) -> None:
        self.rows: Rows | None = None
        self.states: list[RequestState | None] = [None] * slots
        self.passes = 0
        self.rows_run = 0
        self._model = model
        self._planes = planes
        self._scheduler = scheduler
        self._block = Passes(model, planes)
        self._suspended: list[Rows] = []

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def state_of(self, slot: int) -> RequestState:
        """The request in a batch slot."""
        state = self.states[slot]
        assert state is not None, f"a row of slot {slot}, which is free"
        return state

    def add(self, entering: Sequence[tuple[RequestState, Ints]]) -> None:
        """Embeds tokens and adds their rows before loop 1.

        Args:
            entering: Requests with their cache positions, those of one request side by side and in order.
        """
        if not entering:
            return
        tokens = [(state, position) for state, positions in entering for position in positions.tolist()]
        ids = to_device(np.array([state.token_ids[position] for state, position in tokens]), self._model.device)
        with torch.no_grad():
            hidden = self._model.embed(ids)
        trajectories = np.full(len(tokens), -1)
        followed = np.flatnonzero([position >= state.prompt_length - 1 for state, position in tokens])
        if len(followed):
            trajectories[followed] = self._block.trajectories.take(len(followed), self._used_trajectories(), hidden)
        rows = Rows(
            hidden,
            np.array([state.entry.slot for state, _ in tokens]),
            np.concatenate([positions for _, positions in entering]),
            np.zeros(len(tokens), dtype=np.int64),
            np.array([state.target_loops(position) for state, position in tokens]),
            np.array([state.role(position) for state, position in tokens]),
            trajectories,
        )
        self._append(rows)

    def run(self) -> Passed:
        """Runs one pass over all rows."""
        assert self.rows is not None
        self._count(self.rows)
        tables = [[] if state is None else state.entry.blocks for state in self.states]
        ruled: list[Ruled | None] = [None if state is None else state.ruled for state in self.states]
        passed = self._block.run(self.rows, tables, ruled)
        self.rows = passed.rows
        return passed

    def logits(self, which: Ints) -> torch.Tensor:
        """Logits `[N, V]` of some rows."""
        assert self.rows is not None
        with torch.no_grad():
            return self._block.head(self.rows, which)

    def retire(self, stopped: Ints) -> None:
        """Turns rows whose tokens exit into followers, and removes or suspends rows that have reached their target.

        Args:
            stopped: Leaders that exit in this pass, `[N]`.
        """
        rows = self.rows
        assert rows is not None
        roles, targets = rows.roles.copy(), rows.targets.copy()
        roles[stopped] = FOLLOWER
        for row in stopped.tolist():
            state, position = self.state_of(rows.texts[row]), int(rows.columns[row])
            if state.drops and position >= state.prompt_length:
                state.exit_depths[position] = targets[row] = int(rows.loops[row])
        self.rows = replace(rows, roles=roles, targets=targets)
        arrived = rows.loops >= targets
        if arrived.any():
            self._remove_arrived(np.flatnonzero(arrived))

    def _remove_arrived(self, arrived: Ints) -> None:
        rows = self.rows
        assert rows is not None
        early, suspended = [], []
        complete: dict[int, int] = {}
        for row in arrived.tolist():
            state, position = self.state_of(rows.texts[row]), int(rows.columns[row])
            if position in state.suspended:
                suspended.append(row)
            elif rows.loops[row] < state.rule.last_loop:
                early.append(row)
            elif rows.loops[row] == state.rule.total_loops and not (state.drops and position >= state.prompt_length):
                complete[state.entry.slot] = max(complete.get(state.entry.slot, 0), position + 1)
        if early:
            self._propagate_kv(np.array(early))
        for slot, positions in complete.items():
            self._scheduler.register(self.state_of(slot).entry, positions)
        self._suspended += [rows.select(np.array([row])) for row in suspended]
        gone = np.zeros(len(rows), dtype=np.bool_)
        gone[arrived] = True
        self.rows = rows.without(gone)

    def _propagate_kv(self, which: Ints) -> None:
        """Copies the K/V of these rows from the last plane they wrote to all deeper ones, whose loops are not run."""
        rows, size = self.rows, self._planes.shape.size
        assert rows is not None
        positions = rows.columns[which]
        tables = [self.state_of(slot).entry.blocks for slot in rows.texts[which]]
        blocks = np.array([table[position // size] for table, position in zip(tables, positions.tolist(), strict=True)])
        at = to_device(np.stack([blocks, positions % size, rows.loops[which] - 1]), self._model.device)
        self._planes.copy_down(*at.unbind(0))

    def resume(self) -> None:
        """Puts the rows of preempted requests back in flight, once all rows of a request are recomputed."""
        for slot, state in enumerate(self.states):
            if state is None or not state.is_recomputing:
                continue
            parts = [part for part in self._suspended if part.texts[0] == slot]
            if len(parts) < len(state.suspended):
                continue
            rows, before = join(parts), state.resume()
            positions = rows.columns.tolist()
            roles = np.array([before[position].role for position in positions])
            targets = np.array([state.target_loops(position) for position in positions])
            self._suspended = [part for part in self._suspended if part.texts[0] != slot]
            self._append(replace(rows, roles=roles, targets=targets).select(np.argsort(rows.columns)))

    def preempt(self, state: RequestState, slot: int) -> None:
        """Removes the rows of a request and notes how many loops each had finished."""
        if self.rows is not None:
            rows = self.rows.select(np.flatnonzero(self.rows.texts == slot))
            state.suspend(rows.columns, rows.loops, rows.roles)
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Removes the request in a batch slot with its rows."""
        if self.rows is not None:
            self.rows = self.rows.without(self.rows.texts == slot)
        self._suspended = [part for part in self._suspended if part.texts[0] != slot]
        self.states[slot] = None

    def drop_from(self, slot: int, position: int) -> None:
        """Removes the rows of a request from a cache position on."""
        if self.rows is not None:
            self.rows = self.rows.without((self.rows.texts == slot) & (self.rows.columns >= position))

    def _append(self, rows: Rows) -> None:
        self.rows = rows if self.rows is None or not len(self.rows) else join([self.rows, rows])

    def _used_trajectories(self) -> Ints:
        parts = [part.slots for part in (self.rows, *self._suspended) if part is not None]
        slots = np.concatenate([*parts, _NONE])
        return slots[slots >= 0]

    def _count(self, rows: Rows) -> None:
        self.passes += 1
        self.rows_run += len(rows)
        active = rows.roles != PASSIVE
        for slot in np.unique(rows.texts[active]).tolist():
            state = self.state_of(slot)
            new = int((active & (rows.texts == slot) & (rows.columns >= state.prompt_length)).sum())
            state.passes += new > 0
            state.rows += new
