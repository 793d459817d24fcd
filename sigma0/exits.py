"""When a token may stop looping.

Loop states of one token are h_1 ... h_T, after the loop's norm; D_t = h_t - h_{t-1}. The step from the embedding to
h_1 is left out. A rule is *met* at the first loop t where (arXiv 2510.25741 section 3 for `qexit`, arXiv 2509.23314 for
`accel`):

    qexit     sum_{j<=t} l_j * prod_{i<j} (1 - l_i) >= q          with l_j = sigmoid(gate(h_j)); never met at q = 1
    converge  |D_t| / |h_{t-1}| < eps                             from t = 2
    accel     |D_t - D_{t-1}| / |h_{t-1}| < eps and |D_t| <= 0.9 |D_{t-1}|, on `patience` loops running, from t = 3
    margin    p_(1) - p_(2) >= theta                              with p = softmax(head(h_t))

With `accel_scale="steps"`, `accel` is |D_t - D_{t-1}| / (|D_t| + |D_{t-1}|) < eps without the second condition.
`full` and `fixed` are never met: their tokens stop because they reached their loop. The very same code decides for the
rows of a live pass and for the rows of a run-all-loops forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sigma0.settings import ExitConfig, ExitMode

REASON_WHEN_MET: dict[ExitMode, str] = {
    "qexit": "threshold_met",
    "converge": "fixed_point",
    "accel": "accel_fixed_point",
    "margin": "confident",
}
ACCEL_SHRINK = 0.9


def exit_reason(mode: ExitMode, met: bool) -> str:
    """Why a token stopped: its rule was met, it reached T without (`max_depth`), or its loop was `fixed`."""
    if mode in ("full", "fixed"):
        return "fixed"
    return REASON_WHEN_MET[mode] if met else "max_depth"


@dataclass(frozen=True)
class ExitState:
    """What a rule remembers of each row between loops; a field that its mode does not need is None.

    Attributes:
        survival: S_t, the probability that no loop up to t has stopped the token, float32 `[R]`.
        cumulative: CDF_t, float32 `[R]`.
        hidden: h_{t}, in the model's dtype `[R, D]`.
        step: D_t, float32 `[R, D]`.
        streak: Loops running on which `accel` held, int64 `[R]`.
    """

    survival: Tensor | None = None
    cumulative: Tensor | None = None
    hidden: Tensor | None = None
    step: Tensor | None = None
    streak: Tensor | None = None

    def select(self, index: Tensor) -> "ExitState":
        """The rows in `index` `[N]`."""
        return self._map(lambda tensor: tensor.index_select(0, index))

    def concatenate(self, other: "ExitState") -> "ExitState":
        """These rows, then those of `other`."""
        values = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            assert (mine is None) == (theirs is None), f"rows of different rules: {field.name}"
            values[field.name] = None if mine is None else torch.cat([mine, theirs])
        return ExitState(**values)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ExitState":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ExitState(**{name: None if value is None else function(value) for name, value in values.items()})


class ExitRule:
    """Decides, loop by loop, which rows have met an `ExitConfig`.

    Args:
        config: The rule and its thresholds.
        total_loops: T, the loops at full depth.

    Raises:
        ValueError: If `config` names a depth above T.
    """

    def __init__(self, config: ExitConfig, total_loops: int) -> None:
        self.config = config
        self.total_loops = total_loops
        self.fixed_depth = config.stops_at(total_loops)
        self.last_loop = total_loops if self.fixed_depth is None else self.fixed_depth
        self.min_loops = min(config.min_loops, total_loops)
        self.needs_gate = config.mode == "qexit"
        self.needs_logits = config.mode == "margin"

    def start(self, hidden: Tensor) -> ExitState:
        """Fresh state for rows that have run no loop yet.

        Args:
            hidden: The embeddings h_0 `[R, D]`; only shape, dtype and device are read.
        """
        rows = hidden.shape[0]
        if self.config.mode == "qexit":
            ones = torch.ones(rows, dtype=torch.float32, device=hidden.device)
            return ExitState(survival=ones, cumulative=torch.zeros_like(ones))
        if self.config.mode == "converge":
            return ExitState(hidden=hidden)
        if self.config.mode == "accel":
            streak = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
            return ExitState(hidden=hidden, step=torch.zeros_like(hidden, dtype=torch.float32), streak=streak)
        return ExitState()

    def observe(
        self,
        state: ExitState,
        loop: Tensor,
        hidden: Tensor,
        gate_logits: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> tuple[ExitState, Tensor]:
        """Folds in one loop.

        Args:
            state: What is remembered of the rows.
            loop: The loop t that each row has just finished, int64 `[R]`.
            hidden: h_t `[R, D]`.
            gate_logits: gate(h_t) `[R]`, for `qexit`.
            logits: head(h_t) `[R, V]`, for `margin`.

        Returns:
            The new state, and whether each row meets its rule at this loop, bool `[R]` (`min_loops` counted in;
            being at T is not, so a row at T that is not met is saturated).
        """
        mode = self.config.mode
        if mode == "qexit":
            state, met = self._observe_gate(state, gate_logits)
        elif mode == "converge":
            state, met = self._observe_step(state, loop, hidden)
        elif mode == "accel":
            state, met = self._observe_acceleration(state, loop, hidden)
        elif mode == "margin":
            met = self._leads(logits)
        else:
            met = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        return state, met & (loop >= self.min_loops)

    def _observe_gate(self, state: ExitState, gate_logits: Tensor | None) -> tuple[ExitState, Tensor]:
        assert gate_logits is not None and state.survival is not None and state.cumulative is not None
        hazard = torch.sigmoid(gate_logits.float())  # [R]
        cumulative = state.cumulative + hazard * state.survival
        state = replace(state, survival=state.survival * (1.0 - hazard), cumulative=cumulative)
        # below T the sum stays under 1, but in float32 it may round to it: q = 1 means every loop
        met = cumulative >= self.config.q
        return state, met if self.config.q < 1.0 else torch.zeros_like(met)

    def _observe_step(self, state: ExitState, loop: Tensor, hidden: Tensor) -> tuple[ExitState, Tensor]:
        assert state.hidden is not None
        before = state.hidden.float()
        size = torch.linalg.vector_norm(hidden.float() - before, dim=-1)  # [R]
        met = size < self.config.eps * torch.linalg.vector_norm(before, dim=-1)
        return replace(state, hidden=hidden), met & (loop >= 2)

    def _observe_acceleration(self, state: ExitState, loop: Tensor, hidden: Tensor) -> tuple[ExitState, Tensor]:
        assert state.hidden is not None and state.step is not None and state.streak is not None
        before = state.hidden.float()
        step = hidden.float() - before  # [R, D]
        size = torch.linalg.vector_norm(step, dim=-1)  # [R]
        size_before = torch.linalg.vector_norm(state.step, dim=-1)
        bend = torch.linalg.vector_norm(step - state.step, dim=-1)
        if self.config.accel_scale == "steps":
            holds = bend < self.config.eps * (size + size_before)
        else:
            holds = bend < self.config.eps * torch.linalg.vector_norm(before, dim=-1)
            holds &= size <= ACCEL_SHRINK * size_before
        streak = torch.where(holds & (loop >= 3), state.streak + 1, 0)
        return ExitState(hidden=hidden, step=step, streak=streak), streak >= self.config.patience

    def _leads(self, logits: Tensor | None) -> Tensor:
        assert logits is not None
        top = torch.softmax(logits.float(), dim=-1).topk(min(2, logits.shape[-1]), dim=-1).values
        runner_up = top[:, 1] if top.shape[1] == 2 else torch.zeros_like(top[:, 0])
        return top[:, 0] - runner_up >= self.config.theta


@dataclass(frozen=True)
class Selection:
    """The state that each position is read at.

    Attributes:
        hidden: `[B, S, D]`.
        depths: Its loop, from 1, int64 `[B, S]`.
        met: Whether the rule was met there, bool `[B, S]`.
    """

    hidden: Tensor
    depths: Tensor
    met: Tensor


def select_exits(
    rule: ExitRule, loop_states: Tensor, gate_logits: Tensor, head: Callable[[Tensor], Tensor]
) -> Selection:
    """Picks an exit for every position of a run of all loops.

    Args:
        rule: When a token may stop.
        loop_states: h_1 ... h_T, `[T, B, S, D]`.
        gate_logits: `[T, B, S]`.
        head: Output head, called once for each loop if the rule reads logits.

    Returns:
        The chosen states.
    """
    total, batch, length, width = loop_states.shape
    flat = loop_states.reshape(total, batch * length, width)  # [T, N, D]
    rows = flat.shape[1]
    depths = torch.full((rows,), total, dtype=torch.int64, device=flat.device)
    met = torch.zeros(rows, dtype=torch.bool, device=flat.device)
    if rule.fixed_depth is None:
        state = rule.start(flat[0])
        for loop in range(1, total + 1):
            hidden = flat[loop - 1]
            state, here = rule.observe(
                state,
                torch.full((rows,), loop, device=flat.device),
                hidden,
                gate_logits[loop - 1].reshape(rows) if rule.needs_gate else None,
                head(hidden) if rule.needs_logits else None,
            )
            depths = torch.where(here & ~met, loop, depths)
            met |= here
    index = (depths - 1).view(1, rows, 1).expand(1, rows, width)
    chosen = flat.gather(0, index).view(batch, length, width)
    return Selection(chosen, depths.view(batch, length), met.view(batch, length))


def exit_probabilities(gate_logits: Tensor) -> Tensor:
    """p_t = l_t * prod_{j<t} (1 - l_j), the last loop taking the rest of the mass (arXiv 2510.25741 section 3).

    Args:
        gate_logits: `[T, ...]`.

    Returns:
        float32 `[T, ...]`, summing to 1 over T.
    """
    hazard = torch.sigmoid(gate_logits.float())
    survival = torch.ones_like(hazard[0])
    probabilities = []
    for loop in range(len(hazard) - 1):
        probabilities.append(hazard[loop] * survival)
        survival = survival * (1.0 - hazard[loop])
    return torch.stack([*probabilities, survival])
