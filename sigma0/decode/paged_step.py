"""One pass: a loop of every row of every request, and what its end decides, each by the rule of its request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import Bools, Ints
from sigma0.decode.exits import ExitRule
from sigma0.decode.ops import DIVERGED, MET, BoundaryRule, Operations
from sigma0.decode.paged_kv import PagedPlanes, PagedRows
from sigma0.decode.rows import LEADER, Rows
from sigma0.decode.slots import SlotPool
from sigma0.decode.transfer import to_device, to_host


@dataclass(frozen=True)
class Ruled:
    """How one request's rows are decided.

    Attributes:
        rule: When its tokens stop.
        boundary: What is asked at the end of a loop: the same, or a rule that stops nothing but would have been met.
        first_at_end: Whether the token behind the prompt is read at loop T (`verify`).
        prompt: Columns of its prompt.
    """

    rule: ExitRule
    boundary: BoundaryRule
    first_at_end: bool
    prompt: int


@dataclass(frozen=True)
class Passed:
    """What came of a pass.

    Attributes:
        rows: The rows behind it.
        stopped: Leaders whose token is read now, `[N]`.
        met: Whether the rule was met, `[N]`.
        diverged: Whether the loop diverged, `[N]`.
        fates: Of the loop, by row, int `[R]`; 0 where nobody asks.
        held: Whether the end of the loop met the boundary's rule, by row, bool `[R]`.
        first: Of each row that is read at loop T whatever its rule says, its slot, and whether the rule is met and the
            loop diverges here.
    """

    rows: Rows
    stopped: Ints
    met: Bools
    diverged: Bools
    fates: Ints
    held: Bools
    first: tuple[tuple[int, bool, bool], ...] = ()


class Passes:
    """Runs the block.

    Args:
        model: The looped model.
        planes: K/V.
    """

    def __init__(self, model: Any, planes: PagedPlanes) -> None:
        self.model = model
        self.planes = planes
        self.ops: Operations = model.operations
        self.trajectories = SlotPool()

    @torch.no_grad()
    def run(self, rows: Rows, tables: Sequence[Sequence[int]], ruled: Sequence[Ruled | None]) -> Passed:
        """A loop of every row.

        Args:
            rows: At least one.
            tables: Pages by text.
            ruled: How each text's rows are decided, None where there is no text.
        """
        paged = PagedRows(self.planes, self.ops, rows.texts, tables, rows.columns, rows.loops, rows.slots)
        raw = self.model.block(rows.hidden, paged)
        hidden = self.model.norm(raw)
        codes, fates = self._boundaries(rows, raw, hidden, ruled)
        held = codes == MET
        behind = rows.with_loops(hidden)
        leaders = np.flatnonzero(rows.roles == LEADER)
        codes[leaders] = self._by_margin(behind, leaders, codes[leaders], ruled)
        return _passed(behind, leaders, codes, fates, held, ruled)

    def head(self, rows: Rows, which: Ints) -> Tensor:
        """Logits `[N, V]` of some rows."""
        index = to_device(which, rows.hidden.device)
        return self.model.head(rows.hidden.index_select(0, index))  # type: ignore[no-any-return]

    def _boundaries(self, rows: Rows, raw: Tensor, hidden: Tensor, ruled: Sequence[Ruled | None]) -> tuple[Ints, Ints]:
        """Decision and fate of every row that has a trajectory, one call for each rule among them."""
        codes, fates = np.zeros((2, len(rows)), dtype=np.int64)
        groups: dict[BoundaryRule, list[int]] = {}
        for row in np.flatnonzero(rows.slots >= 0).tolist():
            own = ruled[rows.texts[row]]
            assert own is not None
            groups.setdefault(own.boundary, []).append(row)
        told = []
        for rule, members in groups.items():
            if not (rule.watches or rule.decides_by != "none"):
                continue
            which = np.array(members)
            index = to_device(which, raw.device)
            assert self.trajectories.state is not None
            boundary = self.ops.loop_boundary(
                self.model,
                raw.index_select(0, index),
                rows.hidden.index_select(0, index),
                self.trajectories.state,
                to_device(rows.slots[which], raw.device),
                rule,
            )
            told.append((which, torch.stack([boundary.decisions, boundary.fates])))
        if told:
            both = to_host(torch.cat([each for _, each in told], dim=1))
            which = np.concatenate([each for each, _ in told])
            codes[which], fates[which] = both[0], both[1]
        return codes, fates

    def _by_margin(self, rows: Rows, leaders: Ints, codes: Ints, ruled: Sequence[Ruled | None]) -> Ints:
        """The decisions of leaders, those of `margin` taken by their logits."""
        texts = rows.texts[leaders].tolist()
        thetas = np.array([_theta(ruled[text]) for text in texts])
        asked = np.flatnonzero(~np.isnan(thetas))
        if not len(asked):
            return codes
        logits = self.head(rows, leaders[asked])
        for theta in np.unique(thetas[asked]).tolist():
            of_one = np.flatnonzero(thetas[asked] == theta)
            leads = to_host(self.ops.leads(logits.index_select(0, to_device(of_one, logits.device)), theta))
            codes[asked[of_one[leads]]] = MET
        return codes


def _theta(ruled: Ruled | None) -> float:
    assert ruled is not None
    return ruled.rule.threshold if ruled.rule.needs_logits else np.nan


def _passed(rows: Rows, leaders: Ints, codes: Ints, fates: Ints, held: Bools, ruled: Sequence[Ruled | None]) -> Passed:
    """What came of a pass: which leaders stop, whether their rule was met, and whether their loop diverged."""
    stopped, flags, first = [], [], []
    for row in leaders.tolist():
        own, loop = ruled[rows.texts[row]], int(rows.loops[row])
        assert own is not None
        rule = own.rule
        met = bool(codes[row] == MET and rule.fixed_depth is None and loop >= rule.min_loops)
        diverged = bool(codes[row] == DIVERGED and not met and loop < rule.last_loop)
        last = rule.last_loop
        if own.first_at_end and rows.columns[row] == own.prompt - 1:
            first.append((int(rows.texts[row]), met, diverged))
            met, diverged, last = False, False, rule.total_loops
        if met or diverged or loop >= last:
            stopped.append(row)
            flags.append((met, diverged))
    both = np.array(flags, dtype=np.bool_).reshape(-1, 2)
    return Passed(rows, np.array(stopped, dtype=np.int64), both[:, 0], both[:, 1], fates, held, tuple(first))
