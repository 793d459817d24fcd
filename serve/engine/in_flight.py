"""The rows in flight, whose they are, and how they enter, wait and leave."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sigma0.decode.batch import Ints
from sigma0.decode.paged_kv import PagedPlanes
from sigma0.decode.paged_step import Passed, Passes, Ruled
from sigma0.decode.rows import FOLLOWER, PASSIVE, Rows, join
from sigma0.decode.transfer import to_device
from sigma0.serve.engine.request import Running
from sigma0.serve.engine.scheduler import Scheduler

_NONE: Ints = np.zeros(0, dtype=np.int64)


class Flight:
    """Rows of all running requests.

    Args:
        model: The looped model.
        planes: K/V.
        scheduler: Is told which columns are complete.
        slots: Requests that run at most.

    Attributes:
        rows: Those of the next pass; None where there are none.
        by_slot: The request of each slot.
        passes: So far.
        rows_run: Rows in them.
    """

    def __init__(self, model: Any, planes: PagedPlanes, scheduler: Scheduler, slots: int) -> None:
        self.rows: Rows | None = None
        self.by_slot: list[Running | None] = [None] * slots
        self.passes = 0
        self.rows_run = 0
        self._model = model
        self._planes = planes
        self._scheduler = scheduler
        self._block = Passes(model, planes)
        self._held: list[Rows] = []

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def owner(self, slot: int) -> Running:
        """The request of a row."""
        running = self.by_slot[slot]
        assert running is not None, f"a row of slot {slot}, which nobody has"
        return running

    def enter(self, entering: Sequence[tuple[Running, Ints]]) -> None:
        """Puts columns of some requests before loop 1.

        Args:
            entering: Requests with their columns, those of one side by side and in order.
        """
        if not entering:
            return
        each = [(running, column) for running, columns in entering for column in columns.tolist()]
        ids = to_device(np.array([running.ids[column] for running, column in each]), self._model.device)
        with torch.no_grad():
            hidden = self._model.embed(ids)
        columns = np.concatenate([columns for _, columns in entering])
        slots = np.full(len(each), -1)
        asked = np.flatnonzero([column >= running.prompt - 1 for running, column in each])
        if len(asked):
            slots[asked] = self._block.trajectories.take(len(asked), self._used(), hidden)
        rows = Rows(
            hidden,
            np.array([running.entry.slot for running, _ in each]),
            columns,
            np.zeros(len(each), dtype=np.int64),
            np.array([running.target(column) for running, column in each]),
            np.array([running.role(column) for running, column in each]),
            slots,
        )
        self._add(rows)

    def run(self) -> Passed:
        """A pass of all rows."""
        assert self.rows is not None
        self._count(self.rows)
        tables = [[] if running is None else running.entry.pages for running in self.by_slot]
        ruled: list[Ruled | None] = [None if running is None else running.ruled for running in self.by_slot]
        passed = self._block.run(self.rows, tables, ruled)
        self.rows = passed.rows
        return passed

    def head(self, which: Ints) -> torch.Tensor:
        """Logits `[N, V]` of some rows."""
        assert self.rows is not None
        with torch.no_grad():
            return self._block.head(self.rows, which)

    def settle(self, stopped: Ints) -> None:
        """Behind a pass: what stopped was read, and rows that are where they should be leave or are held.

        Args:
            stopped: Leaders whose tokens are read now, `[N]`.
        """
        rows = self.rows
        assert rows is not None
        roles, targets = rows.roles.copy(), rows.targets.copy()
        roles[stopped] = FOLLOWER
        for row in stopped.tolist():
            running, column = self.owner(rows.texts[row]), int(rows.columns[row])
            if running.drops and column >= running.prompt:
                running.depths[column] = targets[row] = int(rows.loops[row])
        self.rows = replace(rows, roles=roles, targets=targets)
        arrived = rows.loops >= targets
        if arrived.any():
            self._leave(np.flatnonzero(arrived))

    def _leave(self, arrived: Ints) -> None:
        rows = self.rows
        assert rows is not None
        early, held = [], []
        complete: dict[int, int] = {}
        for row in arrived.tolist():
            running, column = self.owner(rows.texts[row]), int(rows.columns[row])
            if column in running.halted:
                held.append(row)
            elif rows.loops[row] < running.rule.last_loop:
                early.append(row)
            elif rows.loops[row] == running.rule.total_loops and not (running.drops and column >= running.prompt):
                complete[running.entry.slot] = max(complete.get(running.entry.slot, 0), column + 1)
        if early:
            self._copy_down(np.array(early))
        for slot, columns in complete.items():
            self._scheduler.complete(self.owner(slot).entry, columns)
        self._held += [rows.select(np.array([row])) for row in held]
        gone = np.zeros(len(rows), dtype=np.bool_)
        gone[arrived] = True
        self.rows = rows.without(gone)

    def _copy_down(self, which: Ints) -> None:
        """The deeper loops of these rows are never run: whoever is deeper sees the last plane that they wrote."""
        rows, size = self.rows, self._planes.shape.size
        assert rows is not None
        columns = rows.columns[which]
        tables = [self.owner(slot).entry.pages for slot in rows.texts[which]]
        pages = np.array([table[column // size] for table, column in zip(tables, columns.tolist(), strict=True)])
        at = to_device(np.stack([pages, columns % size, rows.loops[which] - 1]), self._model.device)
        self._planes.copy_down(*at.unbind(0))

    def go_on(self) -> None:
        """Lets requests go on all whose rows have got to where they were when they were put back."""
        for slot, running in enumerate(self.by_slot):
            if running is None or not running.is_replaying:
                continue
            own = [part for part in self._held if part.texts[0] == slot]
            if len(own) < len(running.halted):
                continue
            rows, halted = join(own), running.resume()
            columns = rows.columns.tolist()
            roles = np.array([halted[column].role for column in columns])
            targets = np.array([running.target(column) for column in columns])
            self._held = [part for part in self._held if part.texts[0] != slot]
            self._add(replace(rows, roles=roles, targets=targets).select(np.argsort(rows.columns)))

    def put_back(self, running: Running, slot: int) -> None:
        """Takes the rows of a request away and notes how far they had got."""
        if self.rows is not None:
            own = self.rows.select(np.flatnonzero(self.rows.texts == slot))
            running.halt(own.columns, own.loops, own.roles)
        self.clear(slot)

    def clear(self, slot: int) -> None:
        """Takes the rows of a slot away, and the slot from its request."""
        if self.rows is not None:
            self.rows = self.rows.without(self.rows.texts == slot)
        self._held = [part for part in self._held if part.texts[0] != slot]
        self.by_slot[slot] = None

    def take_back(self, slot: int, column: int) -> None:
        """Takes away the rows of a request from a column on."""
        if self.rows is not None:
            self.rows = self.rows.without((self.rows.texts == slot) & (self.rows.columns >= column))

    def _add(self, rows: Rows) -> None:
        self.rows = rows if self.rows is None or not len(self.rows) else join([self.rows, rows])

    def _used(self) -> Ints:
        parts = [part.slots for part in (self.rows, *self._held) if part is not None]
        slots = np.concatenate([*parts, _NONE])
        return slots[slots >= 0]

    def _count(self, rows: Rows) -> None:
        self.passes += 1
        self.rows_run += len(rows)
        new = rows.roles != PASSIVE
        for slot in np.unique(rows.texts[new]).tolist():
            running = self.owner(slot)
            written = int((new & (rows.texts == slot) & (rows.columns >= running.prompt)).sum())
            running.passes += written > 0
            running.rows += written
