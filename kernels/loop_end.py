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

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from sigma0.kernels import exit_state
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
    raw: Tensor,
    previous: Tensor,
    weights: LoopEndWeights,
    state: ExitState,
    slots: Tensor,
    params: ExitParams | RuleRows,
) -> LoopEndOutput:
    """The formulas above in plain torch; the CPU path.

    Args:
        raw: x `[R, D]`.
        previous: h_{t-1} `[R, D]`; not read in loop 1.
        weights: Weights of norm and gate.
        state: Written in place at `slots`.
        slots: State slot of each row, int64 `[R]`, all different.
        params: Parameters of the exit decision.
    """
    hidden = norm_reference(raw, weights)  # [R, D]
    logits = hidden.float() @ weights.gate.float() + weights.gate_bias.float()  # [R]
    return observe(hidden, previous, logits, state, slots, params)


def norm_reference(raw: Tensor, weights: LoopEndWeights) -> Tensor:
    """RMSNorm `[R, D]`, rounded to the model's dtype before and after the weight as transformers' modules do."""
    wide = raw.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + weights.norm_eps)
    return weights.norm * (wide * scale).to(raw.dtype)


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
        params: Limits of the fates; not `accel-steps`.

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
    steps = grams.steps_of(gram, before, False)
    fit = grams.fit_of(gram, counts)
    fates = grams.fate_of(steps, fit, counts, norms.reshape(-1), states.dtype, params.growth, params.spiral)
    hazard = torch.sigmoid(gate_logits.float()).reshape(-1)
    return _stacked(steps, fit, hazard).view(paths, total, -1), fates.view(paths, total)


def _holds(steps: grams.Steps, loops: Tensor, params: ExitParams | RuleRows) -> Tensor:
    """Whether `accel` holds at this loop, bool `[R]`."""
    close = (steps.bend < params.threshold) & (loops >= 3)
    shrinks = steps.size <= SHRINK * steps.older
    return close & ((shrinks & params.decides("accel")) | params.decides("accel-steps"))


def _decided(
    change: Tensor,
    cumulative: Tensor,
    loops: Tensor,
    streak: Tensor,
    diverging: Tensor,
    params: ExitParams | RuleRows,
) -> Tensor:
    met = (cumulative >= params.threshold) & params.decides("qexit")
    if params.watches:
        met = met | ((change < params.threshold) & (loops >= 2) & params.decides("converge"))
        accel = torch.as_tensor(params.decides("accel")) | params.decides("accel-steps")
        met = met | ((streak >= params.patience) & accel.to(met.device))
    late = (loops >= params.last_loop).int() * LAST_LOOP + GOES_ON
    if params.watches:
        broken = torch.as_tensor(params.break_after, device=met.device)
        late = late.masked_fill((broken > 0) & (diverging >= broken), DIVERGED)
    last = torch.as_tensor(params.last_loop, device=met.device)
    earliest = torch.minimum(torch.as_tensor(params.min_loops, device=met.device), last)
    return late.masked_fill(met & (loops >= earliest), MET)


def loop_end(
    raw: Tensor,
    previous: Tensor,
    weights: LoopEndWeights,
    state: ExitState,
    slots: Tensor,
    params: ExitParams,
    normalize: bool = True,
) -> LoopEndOutput:
    """`loop_end_reference` in one launch of a Triton kernel.

    Args:
        raw: x `[R, D]`.
        previous: h_{t-1} `[R, D]`; not read in loop 1.
        weights: Weights of norm and gate.
        state: Written in place at `slots`.
        slots: State slot of each row, int64 `[R]`, all different.
        params: Parameters of the exit decision.
        normalize: Whether x is normed; if not, h_t = x (for linear maps).

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    rows, width = raw.shape
    _check(raw, previous, weights, state, slots)
    hidden = torch.empty((rows, width), dtype=raw.dtype, device=raw.device)
    statistics = torch.empty((rows, len(STATISTICS)), dtype=torch.float32, device=raw.device)
    fates = torch.empty(rows, dtype=torch.int32, device=raw.device)
    decisions = torch.empty_like(fates)
    if rows:
        block = triton.next_power_of_2(width)
        _loop_end_kernel[(rows,)](
            raw,
            previous,
            weights.norm,
            weights.gate,
            weights.gate_bias,
            state.differences,
            state.gram,
            state.gate,
            state.counts,
            slots,
            hidden,
            statistics,
            fates,
            decisions,
            width,
            raw.stride(0),
            previous.stride(0),
            params.threshold,
            params.growth,
            params.spiral,
            weights.norm_eps,
            4 * torch.finfo(raw.dtype).eps,
            params.last_loop,
            params.patience,
            min(params.min_loops, params.last_loop),
            params.break_after,
            MODE=MODES.index(params.decides_by),
            WATCH=params.watches,
            NORMALIZE=normalize,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return LoopEndOutput(hidden, statistics, fates, decisions)


def warps_for(block: int) -> int:
    """Warps of a program: 8 numbers for each thread, so that half precision is read 16 bytes at a time."""
    return max(1, min(16, block // 256))


def _check(raw: Tensor, previous: Tensor, weights: LoopEndWeights, state: ExitState, slots: Tensor) -> None:
    rows, width = raw.shape
    if raw.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {raw.dtype}: use backend='torch'")
    if tuple(previous.shape) != (rows, width) or tuple(slots.shape) != (rows,):
        raise ValueError(f"{rows} rows of {width}, but previous {tuple(previous.shape)} and slots {tuple(slots.shape)}")
    if tuple(weights.norm.shape) != (width,) or weights.gate.numel() != width or state.differences.shape[2] != width:
        raise ValueError(f"rows of {width} numbers need a weight, a gate and differences of as many")
    if {previous.dtype, weights.norm.dtype, weights.gate.dtype, state.differences.dtype} != {raw.dtype}:
        raise ValueError("rows, weight, gate and differences must share one dtype")
    contiguous = (*vars(state).values(), weights.norm, weights.gate, slots)
    if raw.stride(1) != 1 or previous.stride(1) != 1 or not all(part.is_contiguous() for part in contiguous):
        raise ValueError("the numbers of a row must lie side by side")


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from sigma0.kernels.gram import fate_of_kernel, fit_of_kernel, steps_of_kernel

    # A kernel reads no global but a constexpr: the constants of `exit_state`, for it.
    _KEPT, _GRAM_SIZE = tl.constexpr(exit_state.KEPT), tl.constexpr(exit_state.GRAM_SIZE)
    _GATE_WIDTH, _COUNTS_WIDTH = tl.constexpr(exit_state.GATE_WIDTH), tl.constexpr(exit_state.COUNTS_WIDTH)
    _G00, _G01 = tl.constexpr(exit_state.G00), tl.constexpr(exit_state.G01)
    _G02, _G03 = tl.constexpr(exit_state.G02), tl.constexpr(exit_state.G03)
    _G11, _G12, _G13 = tl.constexpr(exit_state.G11), tl.constexpr(exit_state.G12), tl.constexpr(exit_state.G13)
    _G22, _G23, _G33 = tl.constexpr(exit_state.G22), tl.constexpr(exit_state.G23), tl.constexpr(exit_state.G33)
    _SURVIVAL, _CUMULATIVE = tl.constexpr(exit_state.SURVIVAL), tl.constexpr(exit_state.CUMULATIVE)
    _LOOPS, _STREAK = tl.constexpr(exit_state.LOOPS), tl.constexpr(exit_state.STREAK)
    _DIVERGING, _FATE_HISTORY = tl.constexpr(exit_state.DIVERGING), tl.constexpr(exit_state.FATE_HISTORY)
    _FATE_BITS, _FATE_HISTORY_MASK = tl.constexpr(exit_state.FATE_BITS), tl.constexpr(exit_state.FATE_HISTORY_MASK)
    _CHANGE, _BEND = tl.constexpr(exit_state.CHANGE), tl.constexpr(exit_state.BEND)
    _GAIN, _TURNING = tl.constexpr(exit_state.GAIN), tl.constexpr(exit_state.TURNING)
    _RADIUS, _ANGLE = tl.constexpr(exit_state.RADIUS), tl.constexpr(exit_state.ANGLE)
    _RESIDUAL, _HAZARD = tl.constexpr(exit_state.RESIDUAL), tl.constexpr(exit_state.HAZARD)
    _NONE, _QEXIT = tl.constexpr(exit_state.NONE), tl.constexpr(exit_state.QEXIT)
    _CONVERGE, _SHRINK = tl.constexpr(exit_state.CONVERGE), tl.constexpr(SHRINK)
    _ACCEL, _ACCEL_STEPS = tl.constexpr(exit_state.ACCEL), tl.constexpr(exit_state.ACCEL_STEPS)
    _NO_FATE, _DIVERGE = tl.constexpr(exit_state.NO_FATE), tl.constexpr(exit_state.DIVERGE)
    _GOES_ON, _MET = tl.constexpr(exit_state.GOES_ON), tl.constexpr(exit_state.MET)
    _LAST_LOOP, _DIVERGED = tl.constexpr(exit_state.LAST_LOOP), tl.constexpr(exit_state.DIVERGED)
    _STATISTICS = tl.constexpr(len(STATISTICS))

    @triton.jit
    def _loop_end_kernel(
        raw_ptr,
        previous_ptr,
        weight_ptr,
        gate_weight_ptr,
        gate_bias_ptr,
        differences_ptr,
        gram_ptr,
        gate_ptr,
        counts_ptr,
        slots_ptr,
        hidden_ptr,
        statistics_ptr,
        fates_ptr,
        decisions_ptr,
        width,
        raw_row_stride,
        previous_row_stride,
        threshold,
        growth,
        spiral,
        norm_eps,
        noise,
        last_loop,
        patience,
        min_loops,
        break_after,
        MODE: tl.constexpr,
        WATCH: tl.constexpr,
        NORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        # The whole state is read here, before the first reduction: after that barrier it may be written.
        counts_slot = counts_ptr + slot * _COUNTS_WIDTH
        gate_slot = gate_ptr + slot * _GATE_WIDTH
        gram_slot = gram_ptr + slot * _GRAM_SIZE
        loops = tl.load(counts_slot + _LOOPS) + 1
        count = loops - 1
        survival = tl.load(gate_slot + _SURVIVAL, mask=count >= 1, other=1.0)
        cumulative = tl.load(gate_slot + _CUMULATIVE, mask=count >= 1, other=0.0)
        if WATCH:
            streak = tl.load(counts_slot + _STREAK, mask=count >= 1, other=0)
            diverging = tl.load(counts_slot + _DIVERGING, mask=count >= 1, other=0)
            fate_history = tl.load(counts_slot + _FATE_HISTORY, mask=count >= 1, other=0)
            # one loop later D_{t-i} is D_{t-i-1}: every index of the stored numbers moves on by one
            g11 = tl.load(gram_slot + _G00, mask=count >= 2, other=0.0)
            g12 = tl.load(gram_slot + _G01, mask=count >= 3, other=0.0)
            g13 = tl.load(gram_slot + _G02, mask=count >= 4, other=0.0)
            g22 = tl.load(gram_slot + _G11, mask=count >= 3, other=0.0)
            g23 = tl.load(gram_slot + _G12, mask=count >= 4, other=0.0)
            g33 = tl.load(gram_slot + _G22, mask=count >= 4, other=0.0)
        offsets = tl.arange(0, BLOCK)
        inside = offsets < width
        dtype = hidden_ptr.dtype.element_ty

        x = tl.load(raw_ptr + row * raw_row_stride + offsets, mask=inside, other=0.0)
        if NORMALIZE:
            wide = x.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + norm_eps)
            factor = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            h = ((wide * scale).to(dtype).to(tl.float32) * factor).to(dtype)
        else:
            h = x
        tl.store(hidden_ptr + row * width + offsets, h, mask=inside)
        now = h.to(tl.float32)
        gate_weight = tl.load(gate_weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(now * gate_weight) + tl.load(gate_bias_ptr).to(tl.float32)
        hazard = 1.0 / (1.0 + tl.exp(-logit))
        cumulative += hazard * survival
        tl.store(gate_slot + _SURVIVAL, survival * (1.0 - hazard))
        tl.store(gate_slot + _CUMULATIVE, cumulative)
        statistics_row = statistics_ptr + row * _STATISTICS

        if WATCH:
            now_norm = tl.sqrt(tl.sum(now * now))
            # a mask that the width divides keeps the loads wide
            before = tl.load(
                previous_ptr + row * previous_row_stride + offsets,
                mask=offsets < tl.where(count >= 1, width, 0),
                other=0.0,
            ).to(tl.float32)
            before_norm = tl.sqrt(tl.sum(before * before))
            newest = tl.where(count >= 1, now - before, 0.0).to(dtype)
            kept = differences_ptr + slot * _KEPT * width + offsets
            tl.store(kept + (loops % _KEPT) * width, newest, mask=inside)
            d0 = newest.to(tl.float32)
            # loops - i modulo K, without a negative number
            d1 = tl.load(
                kept + ((loops + _KEPT - 1) % _KEPT) * width, mask=offsets < tl.where(count >= 2, width, 0), other=0.0
            )
            d2 = tl.load(
                kept + ((loops + _KEPT - 2) % _KEPT) * width, mask=offsets < tl.where(count >= 3, width, 0), other=0.0
            )
            d3 = tl.load(
                kept + ((loops + _KEPT - 3) % _KEPT) * width, mask=offsets < tl.where(count >= 4, width, 0), other=0.0
            )
            g00, g01 = tl.sum(d0 * d0), tl.sum(d0 * d1.to(tl.float32))
            g02, g03 = tl.sum(d0 * d2.to(tl.float32)), tl.sum(d0 * d3.to(tl.float32))
            tl.store(gram_slot + _G00, g00)
            tl.store(gram_slot + _G01, g01)
            tl.store(gram_slot + _G02, g02)
            tl.store(gram_slot + _G03, g03)
            tl.store(gram_slot + _G11, g11)
            tl.store(gram_slot + _G12, g12)
            tl.store(gram_slot + _G13, g13)
            tl.store(gram_slot + _G22, g22)
            tl.store(gram_slot + _G23, g23)
            tl.store(gram_slot + _G33, g33)
            size, older, change, bend, gain, grown, turning = steps_of_kernel(
                g00, g01, g11, g22, g33, before_norm, MODE == _ACCEL_STEPS
            )
            radius, angle, residual, turns = fit_of_kernel(g00, g01, g02, g11, g12, g13, g22, g23, g33, count)
            fate = fate_of_kernel(
                size, grown, turning, radius, angle, residual, turns, count, now_norm, noise, growth, spiral
            )
            holds = (bend < threshold) & (loops >= 3)
            if MODE == _ACCEL:
                holds = holds & (size <= _SHRINK * older)
            elif MODE != _ACCEL_STEPS:
                holds = holds & (loops < 0)
            streak = tl.where(holds, streak + 1, 0)
            diverging = tl.where(fate == _DIVERGE, diverging + 1, 0)
            fate_history = ((fate_history << _FATE_BITS) & _FATE_HISTORY_MASK) | fate
            tl.store(statistics_row + _CHANGE, change)
            tl.store(statistics_row + _BEND, bend)
            tl.store(statistics_row + _GAIN, gain)
            tl.store(statistics_row + _TURNING, turning)
            tl.store(statistics_row + _RADIUS, radius)
            tl.store(statistics_row + _ANGLE, angle)
            tl.store(statistics_row + _RESIDUAL, residual)
            tl.store(fates_ptr + row, fate)
            tl.store(counts_slot + _STREAK, streak)
            tl.store(counts_slot + _DIVERGING, diverging)
            tl.store(counts_slot + _FATE_HISTORY, fate_history)
            breaks = (break_after > 0) & (diverging >= break_after)
        else:
            breaks = loops < 0
            for statistic in tl.static_range(_RESIDUAL):
                tl.store(statistics_row + statistic, 0.0)
            tl.store(statistics_row + _RESIDUAL, 1.0)
            tl.store(fates_ptr + row, _NO_FATE)
        tl.store(statistics_row + _HAZARD, hazard)
        tl.store(counts_slot + _LOOPS, loops)

        if MODE == _QEXIT:
            met = cumulative >= threshold
        elif MODE == _CONVERGE:
            met = (change < threshold) & (loops >= 2)
        elif MODE == _NONE:
            met = loops < 0
        else:
            met = streak >= patience
        met = met & (loops >= min_loops)
        late = tl.where(loops >= last_loop, _LAST_LOOP, _GOES_ON)
        tl.store(decisions_ptr + row, tl.where(met, _MET, tl.where(breaks, _DIVERGED, late)))
