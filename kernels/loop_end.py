"""The end of a loop, for all rows at once: norm, gate, differences, their Gram matrix, statistics, exit decision.

For a row that has just finished loop t, with x the output of the block, h_t its norm and D_t = h_t - h_{t-1} (t >= 2):

    hazard     l_t = sigmoid(gate(h_t)),  CDF_t = CDF_{t-1} + l_t S_{t-1},  S_t = S_{t-1} (1 - l_t)
    Gram       G_ij = <D_{t-i}, D_{t-j}>, i <= j < K = 4: four new numbers for each loop, the other six move on
    statistics what `gram.py` makes of them
    decision   met where `qexit`: CDF_t >= q; `converge`: change < eps (t >= 2); `accel`: bend < eps and
               |D_t| <= 0.9 |D_{t-1}| on `patience` loops running (t >= 3; arXiv 2509.23314), `accel-steps` without the
               shrinking; and t >= min_loops. Else diverged where the fate has been `diverge` on `break_after` loops
               running, else last loop where t = T

Bytes for each row, with D numbers of b bytes: read x, h_{t-1} and three differences, write h_t and D_t: 7 D b, of which
none can be left out while differences are kept; weight and gate (2 D b) are shared by all rows and stay in the cache.
Where nothing is watched: x and h_t, 2 D b.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels import gram as grams
from sigma0.kernels.exit_state import (
    ACCEL_STEPS,
    CUMULATIVE,
    DIVERGE,
    DIVERGED,
    DIVERGING,
    FATE_BITS,
    FATE_HISTORY,
    FATE_HISTORY_MASK,
    G00,
    G01,
    G02,
    G11,
    G12,
    G22,
    GOES_ON,
    HAZARD,
    KEPT,
    LAST_LOOP,
    LOOPS,
    MET,
    MODES,
    RESIDUAL,
    STATISTICS,
    STREAK,
    SURVIVAL,
    ExitParams,
    ExitState,
    LoopEndOutput,
    LoopEndWeights,
    RuleRows,
)

SHRINK = 0.9
# The six numbers that move on, and how many differences there must be for each of the ten.
_MOVING, _NEEDED = (G00, G01, G02, G11, G12, G22), (1, 2, 3, 4, 2, 3, 4, 3, 4, 4)
# i and j of the ten numbers
_PAIRS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3), (0, 1, 2, 3, 1, 2, 3, 2, 3, 3)


def loop_end_reference(
    hidden: Tensor,
    previous: Tensor,
    weights: LoopEndWeights,
    state: ExitState,
    slots: Tensor,
    params: ExitParams | RuleRows,
) -> LoopEndOutput:
    """The formulas above after the norm, in plain torch.

    Args:
        hidden: h_t `[R, D]`.
        previous: h_{t-1} `[R, D]`; not read in loop 1.
        weights: Weights of the gate.
        state: Written in place at `slots`.
        slots: State slot of each row, int64 `[R]`, all different.
        params: Parameters of the exit decision.
    """
    if weights.gate is None or weights.gate_bias is None:
        logits = hidden.new_full((len(hidden),), -math.inf)  # [R]
    else:
        logits = hidden.float() @ weights.gate.float() + weights.gate_bias.float()
    return observe(hidden, previous, logits, state, slots, params)


def observe(
    hidden: Tensor,
    previous: Tensor,
    gate_logits: Tensor,
    state: ExitState,
    slots: Tensor,
    params: ExitParams | RuleRows,
) -> LoopEndOutput:
    """Everything after norm and gate.

    Args:
        hidden: h_t `[R, D]`.
        previous: h_{t-1} `[R, D]`; not read in loop 1.
        gate_logits: `[R]`.
        state: Written in place at `slots`.
        slots: State slot of each row, int64 `[R]`, all different.
        params: Parameters of the exit decision.
    """
    counts = state.counts.index_select(0, slots)  # [R, 4]
    fresh = counts[:, LOOPS] == 0
    loops = counts[:, LOOPS] + 1
    hazard = torch.sigmoid(gate_logits.float())  # [R]
    gate = state.gate.index_select(0, slots)
    survival = gate[:, SURVIVAL].masked_fill(fresh, 1.0)
    cumulative = gate[:, CUMULATIVE].masked_fill(fresh, 0.0) + hazard * survival
    state.gate.index_copy_(0, slots, torch.stack([survival * (1.0 - hazard), cumulative], dim=-1))
    if not params.watches:
        decided = _decided(hazard, cumulative, loops, loops, loops, params)
        state.counts[:, LOOPS].index_copy_(0, slots, loops)
        statistics = torch.zeros((len(loops), len(STATISTICS)), dtype=torch.float32, device=hidden.device)
        statistics[:, RESIDUAL] = 1.0
        statistics[:, HAZARD] = hazard
        return LoopEndOutput(hidden, statistics, torch.zeros_like(decided), decided)
    now, before = hidden.float(), previous.float().masked_fill(fresh[:, None], 0.0)
    difference = (now - before).masked_fill(fresh[:, None], 0.0).to(hidden.dtype)  # [R, D]
    state.differences[slots, loops % KEPT] = difference
    gram = _grown_gram(state, slots, loops, difference.float())  # [R, 10]
    state.gram.index_copy_(0, slots, gram)
    count = loops - 1
    steps = grams.steps_of(gram, torch.linalg.vector_norm(before, dim=-1), params.decides(MODES[ACCEL_STEPS]))
    fit = grams.fit_of(gram, count)
    norm = torch.linalg.vector_norm(now, dim=-1)
    fates = grams.fate_of(steps, fit, count, norm, hidden.dtype, params.growth, params.spiral)
    kept = counts.masked_fill(fresh[:, None], 0)
    streak = (kept[:, STREAK] + 1) * _holds(steps, loops, params)
    diverging = (kept[:, DIVERGING] + 1) * (fates == DIVERGE)
    fate_history = (kept[:, FATE_HISTORY] << FATE_BITS) & FATE_HISTORY_MASK | fates
    state.counts.index_copy_(0, slots, torch.stack([loops, streak, diverging, fate_history], dim=-1))
    decided = _decided(steps.change, cumulative, loops, streak, diverging, params)
    return LoopEndOutput(hidden, _stacked(steps, fit, hazard), fates, decided)


def _stacked(steps: grams.Steps, fit: grams.Fit, hazard: Tensor) -> Tensor:
    """The numbers in the order of `STATISTICS`, `[R, 8]`."""
    numbers = [steps.change, steps.bend, steps.gain, steps.turning, fit.radius, fit.angle, fit.residual, hazard]
    return torch.stack(numbers, dim=-1)


def _grown_gram(state: ExitState, slots: Tensor, loops: Tensor, difference: Tensor) -> Tensor:
    """G with the row of the newest difference, `[R, 10]`; differences that do not exist count as zero."""
    count = (loops - 1)[:, None]
    entries = (loops[:, None] - torch.arange(KEPT, device=slots.device)) % KEPT  # [R, K]
    kept = state.differences[slots[:, None], entries].float()  # [R, K, D]
    # an earlier token may have left anything in the slot, so what does not exist is masked, not multiplied by zero
    needed = torch.tensor(_NEEDED, dtype=torch.int32, device=slots.device)
    row = torch.bmm(kept.masked_fill((count < needed[:KEPT])[..., None], 0.0), difference[:, :, None])[..., 0]  # [R, K]
    moved = state.gram.index_select(0, slots)[:, _MOVING]
    return torch.cat([row, moved], dim=-1).masked_fill(count < needed, 0.0)


@lru_cache(maxsize=16)
def _gram_places(total: int, device: torch.device) -> tuple[Tensor, ...]:
    """Where the Gram numbers of every loop stand among the padded products of T steps, and which do not exist.

    Returns:
        Rows and columns `[T, 10]`, differences before each loop int32 `[T]`, and which numbers are missing `[T, 10]`.
    """
    newest = torch.arange(total, device=device)[:, None] + KEPT - 1
    count = torch.arange(total, dtype=torch.int32, device=device)
    first, second = (newest - torch.tensor(part, device=device) for part in _PAIRS)
    return first, second, count, count[:, None] < torch.tensor(_NEEDED, dtype=torch.int32, device=device)


def observe_paths(states: Tensor, gate_logits: Tensor, params: ExitParams) -> tuple[Tensor, Tensor]:
    """The statistics and fates that `observe` gives loop by loop, of whole paths at once.

    Where no decision needs them at once, one call later serves many tokens.

    Args:
        states: h_1 ... h_T, `[N, T, D]`; past the end of a path both states and results are
            undefined.
        gate_logits: `[N, T]`.
        params: Limits of the fates, and whether `bend` is that of `accel-steps`.

    Returns:
        Statistics float32 `[N, T, 8]` and fates int32 `[N, T]`.
    """
    paths, total, _ = states.shape
    wide = states.float()
    # D_t is stored at t - 1, so that the index of a state is the number of its differences; the first has none
    differences = torch.zeros_like(wide)
    differences[:, 1:] = (wide[:, 1:] - wide[:, :-1]).to(states.dtype)
    products = torch.bmm(differences, differences.transpose(1, 2))  # [N, T, T]
    padded = torch.nn.functional.pad(products, (KEPT - 1, 0, KEPT - 1, 0))
    first, second, count, missing = _gram_places(total, states.device)
    gram = padded[:, first, second].masked_fill(missing, 0.0)  # [N, T, 10]
    norms = torch.linalg.vector_norm(wide, dim=-1)  # [N, T]
    before = torch.nn.functional.pad(norms[:, :-1], (1, 0)).reshape(-1)
    gram, counts = gram.reshape(-1, len(_NEEDED)), count.repeat(paths)
    steps = grams.steps_of(gram, before, params.decides(MODES[ACCEL_STEPS]))
    fit = grams.fit_of(gram, counts)
    fates = grams.fate_of(steps, fit, counts, norms.reshape(-1), states.dtype, params.growth, params.spiral)
    hazard = torch.sigmoid(gate_logits.float()).reshape(-1)
    return _stacked(steps, fit, hazard).view(paths, total, -1), fates.view(paths, total)


def _holds(steps: grams.Steps, loops: Tensor, params: ExitParams | RuleRows) -> Tensor:
    """Whether `accel` holds at this loop, bool `[R]`."""
    close = (steps.bend < params.threshold) & (loops >= 3)
    holds = torch.zeros_like(close)
    if "accel" in params.modes:
        holds = holds | (close & (steps.size <= SHRINK * steps.older) & params.decides("accel"))
    if "accel-steps" in params.modes:
        holds = holds | (close & params.decides("accel-steps"))
    return holds


def _decided(
    change: Tensor,
    cumulative: Tensor,
    loops: Tensor,
    streak: Tensor,
    diverging: Tensor,
    params: ExitParams | RuleRows,
) -> Tensor:
    """Decisions, int32 `[R]`; only what some row decides by is computed."""
    late = (loops >= params.last_loop).int() * LAST_LOOP + GOES_ON
    if params.watches:
        late = late.masked_fill((diverging >= params.break_after) & (params.break_after > 0), DIVERGED)
    met = torch.zeros_like(loops, dtype=torch.bool)
    for mode in sorted(params.modes):
        if mode == "qexit":
            holds = cumulative >= params.threshold
        elif mode == "converge":
            holds = (change < params.threshold) & (loops >= 2)
        else:
            holds = streak >= params.patience
        met = met | (holds & params.decides(mode))
    return late.masked_fill(met & ((loops >= params.min_loops) | (loops >= params.last_loop)), MET)
