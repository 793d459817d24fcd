"""One pass over the rows of all requests: a loop of every row, and the exits by the rule of each request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigma0.decode.batch import DECODING, Bools, Ints, Rows
from sigma0.decode.exit_states import ExitStatePool
from sigma0.decode.exits import ExitRule
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import DIVERGED, MET, ExitParams, Operations
from sigma0.decode.paged_kv import PagedPlanes, PagedRows
from sigma0.decode.transfer import to_device, to_host


@dataclass(frozen=True)
class RequestExit:
    """Exit decision of one request.

    Attributes:
        rule: When its tokens stop.
        params: Parameters of the loop end: of the same rule, or of one that stops nothing and is only evaluated.
        first_at_end: Whether the first token is sampled at loop T (`verify`).
        prompt: Length of its prompt.
    """

    rule: ExitRule
    params: ExitParams
    first_at_end: bool
    prompt: int


@dataclass(frozen=True)
class PassOutput:
    """Result of a pass.

    Attributes:
        rows: The rows after it.
        stopped: Decoding rows that exit, `[N]`.
        met: Whether the rule was met, `[N]`.
        diverged: Whether the loop diverged, `[N]`.
        fates: Fate of the loop of each row, int `[R]`; 0 where none is kept.
        loop_end_met: Whether the loop end of each row met the rule of `RequestExit.params`, bool `[R]`.
        first: For each row whose token is sampled at loop T in any case: its batch slot, whether the rule is met, and
            whether the loop diverges.
    """

    rows: Rows
    stopped: Ints
    met: Bools
    diverged: Bools
    fates: Ints
    loop_end_met: Bools
    first: tuple[tuple[int, bool, bool], ...] = ()


class Passes:
    """Runs the block.

    Args:
        model: The looped model.
        planes: K/V.
    """

    def __init__(self, model: LoopedModel, planes: PagedPlanes) -> None:
        self.model = model
        self.planes = planes
        self.ops: Operations = model.operations
        self.exit_states = ExitStatePool()

    @torch.no_grad()
    def run(
        self, rows: Rows, tables: Sequence[Sequence[int]], request_exits: Sequence[RequestExit | None]
    ) -> PassOutput:
        """A loop of every row.

        Args:
            rows: At least one.
            tables: Block table of each batch slot.
            request_exits: Exit decision of each batch slot, None where it is free.
        """
        paged = PagedRows(
            self.planes, self.ops, rows.batch_slots, tables, rows.cache_positions, rows.loops, rows.state_slots
        )
        raw = self.model.block(rows.hidden, paged)
        hidden = self.model.norm(raw)
        codes, fates = self._loop_ends(rows, raw, hidden, request_exits)
        loop_end_met = codes == MET
        advanced = rows.with_loops(hidden)
        decoding = np.flatnonzero(rows.roles == DECODING)
        codes[decoding] = self._by_margin(advanced, decoding, codes[decoding], request_exits)
        return _passed(advanced, decoding, codes, fates, loop_end_met, request_exits)

    def head(self, rows: Rows, which: Ints) -> Tensor:
        """Logits `[N, V]` of some rows."""
        index = to_device(which, rows.hidden.device)
        return self.model.head(rows.hidden.index_select(0, index))

    def _loop_ends(
        self, rows: Rows, raw: Tensor, hidden: Tensor, request_exits: Sequence[RequestExit | None]
    ) -> tuple[Ints, Ints]:
        """Decision and fate of every row that has an exit state, in one call for each set of parameters."""
        codes, fates = np.zeros((2, len(rows)), dtype=np.int64)
        groups: dict[ExitParams, list[int]] = {}
        for row in np.flatnonzero(rows.state_slots >= 0).tolist():
            request = request_exits[rows.batch_slots[row]]
            assert request is not None
            groups.setdefault(request.params, []).append(row)
        outputs = []
        for rule, members in groups.items():
            if not (rule.watches or rule.decides_by != "none"):
                continue
            which = np.array(members)
            index = to_device(which, raw.device)
            assert self.exit_states.state is not None
            loop_end = self.ops.loop_end(
                self.model,
                raw.index_select(0, index),
                rows.hidden.index_select(0, index),
                self.exit_states.state,
                to_device(rows.state_slots[which], raw.device),
                rule,
            )
            outputs.append((which, torch.stack([loop_end.decisions, loop_end.fates])))
        if outputs:
            both = to_host(torch.cat([codes_and_fates for _, codes_and_fates in outputs], dim=1))
            which = np.concatenate([rows_of_one for rows_of_one, _ in outputs])
            codes[which], fates[which] = both[0], both[1]
        return codes, fates

    def _by_margin(self, rows: Rows, decoding: Ints, codes: Ints, request_exits: Sequence[RequestExit | None]) -> Ints:
        """The decisions of decoding rows, those of `margin` by their logits."""
        batch_slots = rows.batch_slots[decoding].tolist()
        thetas = np.array([_theta(request_exits[slot]) for slot in batch_slots])
        by_margin = np.flatnonzero(~np.isnan(thetas))
        if not len(by_margin):
            return codes
        logits = self.head(rows, decoding[by_margin])
        for theta in np.unique(thetas[by_margin]).tolist():
            of_one = np.flatnonzero(thetas[by_margin] == theta)
            leads = to_host(self.ops.leads(logits.index_select(0, to_device(of_one, logits.device)), theta))
            codes[by_margin[of_one[leads]]] = MET
        return codes


def _theta(request_exits: RequestExit | None) -> float:
    assert request_exits is not None
    return request_exits.rule.threshold if request_exits.rule.needs_logits else np.nan


def _passed(
    rows: Rows,
    decoding: Ints,
    codes: Ints,
    fates: Ints,
    loop_end_met: Bools,
    request_exits: Sequence[RequestExit | None],
) -> PassOutput:
    """Result of a pass: which decoding rows exit, whether their rule was met, and whether their loop diverged."""
    stopped, flags, first = [], [], []
    for row in decoding.tolist():
        request, loop = request_exits[rows.batch_slots[row]], int(rows.loops[row])
        assert request is not None
        rule = request.rule
        met = bool(codes[row] == MET and rule.fixed_depth is None and loop >= rule.min_loops)
        diverged = bool(codes[row] == DIVERGED and not met and loop < rule.last_loop)
        last = rule.last_loop
        if request.first_at_end and rows.cache_positions[row] == request.prompt - 1:
            first.append((int(rows.batch_slots[row]), met, diverged))
            met, diverged, last = False, False, rule.total_loops
        if met or diverged or loop >= last:
            stopped.append(row)
            flags.append((met, diverged))
    both = np.array(flags, dtype=np.bool_).reshape(-1, 2)
    return PassOutput(
        rows, np.array(stopped, dtype=np.int64), both[:, 0], both[:, 1], fates, loop_end_met, tuple(first)
    )
