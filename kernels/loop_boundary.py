"""The end of a loop, for all rows at once: norm, gate, differences, their Gram matrix, what it tells, and the exit.

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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigma0.kernels import gram as grams
from sigma0.kernels.boundary import (
    CUMULATIVE,
    DIVERGED,
    DIVERGING,
    FATES,
    GOES_ON,
    HAZARD,
    KEPT,
    LAST_LOOP,
    LOOPS,
    MET,
    MODES,
    REMEMBERED,
    RESIDUAL,
    STREAK,
    SURVIVAL,
    Boundary,
    BoundaryRule,
    BoundaryState,
    BoundaryWeights,
)

SHRINK = 0.9
# The six numbers that move on, and how many differences there must be for each of the ten.
_MOVING, _NEEDED = (0, 1, 2, 4, 5, 7), (1, 2, 3, 4, 2, 3, 4, 3, 4, 4)
# i and j of the ten numbers
_PAIRS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3), (0, 1, 2, 3, 1, 2, 3, 2, 3, 3)


def loop_boundary_reference(
    raw: Tensor, previous: Tensor, weights: BoundaryWeights, state: BoundaryState, slots: Tensor, rule: BoundaryRule
) -> Boundary:
    """The formulas above in plain torch; what a CPU runs.

    Args:
        raw: x `[R, D]`.
        previous: h_{t-1} `[R, D]`; not looked at in loop 1.
        weights: Of norm and gate.
        state: Written in place at `slots`.
        slots: Slot of each row, int64 `[R]`, none twice.
        rule: What decides.
    """
    hidden = norm_reference(raw, weights)  # [R, D]
    logits = hidden.float() @ weights.gate.float() + weights.gate_bias.float()  # [R]
    return observe(hidden, previous, logits, state, slots, rule)


def norm_reference(raw: Tensor, weights: BoundaryWeights) -> Tensor:
    """RMSNorm `[R, D]`, rounded to the model's dtype before the weight and behind it as transformers' modules do."""
    wide = raw.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + weights.norm_eps)
    return weights.norm * (wide * scale).to(raw.dtype)


def observe(
    hidden: Tensor, previous: Tensor, gate_logits: Tensor, state: BoundaryState, slots: Tensor, rule: BoundaryRule
) -> Boundary:
    """Everything behind norm and gate.

    Args:
        hidden: h_t `[R, D]`.
        previous: h_{t-1} `[R, D]`; not looked at in loop 1.
        gate_logits: `[R]`.
        state: Written in place at `slots`.
        slots: Slot of each row, int64 `[R]`, none twice.
        rule: What decides.
    """
    counts = state.counts.index_select(0, slots)  # [R, 4]
    fresh = counts[:, LOOPS] == 0
    loops = counts[:, LOOPS] + 1
    hazard = torch.sigmoid(gate_logits.float())  # [R]
    gate = state.gate.index_select(0, slots)
    survival = gate[:, SURVIVAL].masked_fill(fresh, 1.0)
    cumulative = gate[:, CUMULATIVE].masked_fill(fresh, 0.0) + hazard * survival
    state.gate.index_copy_(0, slots, torch.stack([survival * (1.0 - hazard), cumulative], dim=-1))
    if not rule.watches:
        decided = _decided(hazard, cumulative, loops, loops, loops, rule)
        state.counts[:, LOOPS].index_copy_(0, slots, loops)
        statistics = torch.zeros((len(loops), 8), dtype=torch.float32, device=hidden.device)
        statistics[:, RESIDUAL] = 1.0
        statistics[:, HAZARD] = hazard
        return Boundary(hidden, statistics, torch.zeros_like(decided), decided)
    now, before = hidden.float(), previous.float().masked_fill(fresh[:, None], 0.0)
    difference = (now - before).masked_fill(fresh[:, None], 0.0).to(hidden.dtype)  # [R, D]
    state.differences[slots, loops % KEPT] = difference
    gram = _grown_gram(state, slots, loops, difference.float())  # [R, 10]
    state.gram.index_copy_(0, slots, gram)
    count = loops - 1
    steps = grams.steps_of(gram, torch.linalg.vector_norm(before, dim=-1), rule.mode == "accel-steps")
    fit = grams.fit_of(gram, count)
    norm = torch.linalg.vector_norm(now, dim=-1)
    fates = grams.fate_of(steps, fit, count, norm, hidden.dtype, rule.growth, rule.spiral)
    kept = counts.masked_fill(fresh[:, None], 0)
    streak = (kept[:, STREAK] + 1) * _holds(steps, loops, rule)
    diverging = (kept[:, DIVERGING] + 1) * (fates == FATES.index("diverge"))
    remembered = (kept[:, REMEMBERED] << 2) & 0x3FFFFFFF | fates
    state.counts.index_copy_(0, slots, torch.stack([loops, streak, diverging, remembered], dim=-1))
    told = [steps.change, steps.bend, steps.gain, steps.turning, fit.radius, fit.angle, fit.residual, hazard]
    decided = _decided(steps.change, cumulative, loops, streak, diverging, rule)
    return Boundary(hidden, torch.stack(told, dim=-1), fates, decided)


def _grown_gram(state: BoundaryState, slots: Tensor, loops: Tensor, difference: Tensor) -> Tensor:
    """G with the row of the newest difference, `[R, 10]`; differences that do not exist count as zero."""
    count = (loops - 1)[:, None]
    places = (loops[:, None] - torch.arange(KEPT, device=slots.device)) % KEPT  # [R, K]
    kept = state.differences[slots[:, None], places].float()  # [R, K, D]
    # a slot's last token may have left anything there, so what does not exist is masked, not multiplied by zero
    needed = torch.tensor(_NEEDED, dtype=torch.int32, device=slots.device)
    row = torch.bmm(kept.masked_fill((count < needed[:KEPT])[..., None], 0.0), difference[:, :, None])[..., 0]  # [R, K]
    moved = state.gram.index_select(0, slots)[:, _MOVING]
    return torch.cat([row, moved], dim=-1).masked_fill(count < needed, 0.0)


@lru_cache(maxsize=16)
def _places(total: int) -> tuple[NDArray[Any], ...]:
    """Where the Gram numbers of every loop stand among the padded products of T steps, and which do not exist.

    Returns:
        Rows and columns `[T, 10]`, differences before each loop int32 `[T]`, and which numbers are missing `[T, 10]`.
    """
    newest = np.arange(total)[:, None] + KEPT - 1
    count = np.arange(total, dtype=np.int32)
    first, second = (newest - np.array(part) for part in _PAIRS)
    return first, second, count, count[:, None] < np.array(_NEEDED)


def observe_paths(states: Tensor, gate_logits: Tensor, rule: BoundaryRule) -> tuple[Tensor, Tensor]:
    """The statistics and fates that `observe` gives loop by loop, of whole paths at once.

    Where no decision needs them they can wait, and then one call serves many tokens.

    Args:
        states: h_1 ... h_T, `[N, T, D]`; a path that ends early holds anything behind its end, and so do its figures.
        gate_logits: `[N, T]`.
        rule: What spirals and diverges; not `accel-steps`.

    Returns:
        Statistics float32 `[N, T, 8]` and fates int32 `[N, T]`.
    """
    paths, total, _ = states.shape
    wide = states.float()
    # D_t stands at t - 1, so that the place of a state is the number of its differences; the first has none
    differences = torch.zeros_like(wide)
    differences[:, 1:] = (wide[:, 1:] - wide[:, :-1]).to(states.dtype)
    products = torch.bmm(differences, differences.transpose(1, 2))  # [N, T, T]
    padded = torch.nn.functional.pad(products, (KEPT - 1, 0, KEPT - 1, 0))
    first, second, count, missing = (torch.from_numpy(part).to(states.device) for part in _places(total))
    gram = padded[:, first, second].masked_fill(missing, 0.0)  # [N, T, 10]
    norms = torch.linalg.vector_norm(wide, dim=-1)  # [N, T]
    before = torch.nn.functional.pad(norms[:, :-1], (1, 0)).reshape(-1)
    gram, counts = gram.reshape(-1, len(_NEEDED)), count.repeat(paths)
    steps = grams.steps_of(gram, before, False)
    fit = grams.fit_of(gram, counts)
    fates = grams.fate_of(steps, fit, counts, norms.reshape(-1), states.dtype, rule.growth, rule.spiral)
    hazard = torch.sigmoid(gate_logits.float()).reshape(-1)
    told = [steps.change, steps.bend, steps.gain, steps.turning, fit.radius, fit.angle, fit.residual, hazard]
    return torch.stack(told, dim=-1).view(paths, total, -1), fates.view(paths, total)


def _holds(steps: grams.Steps, loops: Tensor, rule: BoundaryRule) -> Tensor:
    """Whether `accel` holds at this loop, bool `[R]`."""
    close = (steps.bend < rule.threshold) & (loops >= 3)
    if rule.mode == "accel":
        return close & (steps.size <= SHRINK * steps.older)
    return close if rule.mode == "accel-steps" else torch.zeros_like(close)


def _decided(
    change: Tensor, cumulative: Tensor, loops: Tensor, streak: Tensor, diverging: Tensor, rule: BoundaryRule
) -> Tensor:
    late = (loops >= rule.last_loop).int() * LAST_LOOP + GOES_ON
    if rule.break_after:
        late = late.masked_fill(diverging >= rule.break_after, DIVERGED)
    if rule.decides_by == "none":
        return late
    if rule.mode == "qexit":
        met = cumulative >= rule.threshold
    elif rule.mode == "converge":
        met = (change < rule.threshold) & (loops >= 2)
    else:
        met = streak >= rule.patience
    return late.masked_fill(met & (loops >= min(rule.min_loops, rule.last_loop)), MET)


def loop_boundary(
    raw: Tensor,
    previous: Tensor,
    weights: BoundaryWeights,
    state: BoundaryState,
    slots: Tensor,
    rule: BoundaryRule,
    normalize: bool = True,
) -> Boundary:
    """`loop_boundary_reference` in one launch of a Triton kernel.

    Args:
        raw: x `[R, D]`.
        previous: h_{t-1} `[R, D]`; not looked at in loop 1.
        weights: Of norm and gate.
        state: Written in place at `slots`.
        slots: Slot of each row, int64 `[R]`, none twice.
        rule: What decides.
        normalize: Whether x is normed; without, h_t = x (for linear maps).

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not take.
    """
    rows, width = raw.shape
    _check(raw, previous, weights, state, slots)
    hidden = torch.empty((rows, width), dtype=raw.dtype, device=raw.device)
    statistics = torch.empty((rows, 8), dtype=torch.float32, device=raw.device)
    fates = torch.empty(rows, dtype=torch.int32, device=raw.device)
    decisions = torch.empty_like(fates)
    if rows:
        block = triton.next_power_of_2(width)
        _loop_boundary_kernel[(rows,)](
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
            rule.threshold,
            rule.growth,
            rule.spiral,
            weights.norm_eps,
            4 * torch.finfo(raw.dtype).eps,
            rule.last_loop,
            rule.patience,
            min(rule.min_loops, rule.last_loop),
            rule.break_after,
            MODE=MODES.index(rule.decides_by),
            WATCH=rule.watches,
            NORMALIZE=normalize,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return Boundary(hidden, statistics, fates, decisions)


def warps_for(block: int) -> int:
    """Warps of a program: 8 numbers for each thread, so that half precision is read 16 bytes at a time."""
    return max(1, min(16, block // 256))


def _check(raw: Tensor, previous: Tensor, weights: BoundaryWeights, state: BoundaryState, slots: Tensor) -> None:
    rows, width = raw.shape
    if raw.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {raw.dtype}: use backend='torch'")
    if tuple(previous.shape) != (rows, width) or tuple(slots.shape) != (rows,):
        raise ValueError(f"{rows} rows of {width}, but previous {tuple(previous.shape)} and slots {tuple(slots.shape)}")
    if tuple(weights.norm.shape) != (width,) or weights.gate.numel() != width or state.differences.shape[2] != width:
        raise ValueError(f"rows of {width} numbers need a weight, a gate and differences of as many")
    if {previous.dtype, weights.norm.dtype, weights.gate.dtype, state.differences.dtype} != {raw.dtype}:
        raise ValueError("rows, weight, gate and differences must share one dtype")
    together = (*vars(state).values(), weights.norm, weights.gate, slots)
    if raw.stride(1) != 1 or previous.stride(1) != 1 or not all(part.is_contiguous() for part in together):
        raise ValueError("the numbers of a row must lie side by side")


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from sigma0.kernels.gram import fate_of_kernel, fit_of_kernel, steps_of_kernel

    @triton.jit
    def _loop_boundary_kernel(
        raw,
        previous,
        weight,
        gate_weight,
        gate_bias,
        differences,
        gram,
        gate,
        counts,
        slots,
        hidden,
        statistics,
        fates,
        decisions,
        width,
        raw_stride,
        previous_stride,
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
        slot = tl.load(slots + row).to(tl.int64)
        # All that is remembered is read here, ahead of the first reduction: behind that barrier it may be written.
        mine = counts + slot * 4
        loops = tl.load(mine) + 1
        count = loops - 1
        survival = tl.load(gate + slot * 2, mask=count >= 1, other=1.0)
        cumulative = tl.load(gate + slot * 2 + 1, mask=count >= 1, other=0.0)
        kept = gram + slot * 10
        if WATCH:
            streak = tl.load(mine + 1, mask=count >= 1, other=0)
            diverging = tl.load(mine + 2, mask=count >= 1, other=0)
            remembered = tl.load(mine + 3, mask=count >= 1, other=0)
            g11 = tl.load(kept, mask=count >= 2, other=0.0)
            g12 = tl.load(kept + 1, mask=count >= 3, other=0.0)
            g13 = tl.load(kept + 2, mask=count >= 4, other=0.0)
            g22 = tl.load(kept + 4, mask=count >= 3, other=0.0)
            g23 = tl.load(kept + 5, mask=count >= 4, other=0.0)
            g33 = tl.load(kept + 7, mask=count >= 4, other=0.0)
        columns = tl.arange(0, BLOCK)
        inside = columns < width
        dtype = hidden.dtype.element_ty

        x = tl.load(raw + row * raw_stride + columns, mask=inside, other=0.0)
        if NORMALIZE:
            wide = x.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + norm_eps)
            factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            h = ((wide * scale).to(dtype).to(tl.float32) * factor).to(dtype)
        else:
            h = x
        tl.store(hidden + row * width + columns, h, mask=inside)
        now = h.to(tl.float32)
        gate_row = tl.load(gate_weight + columns, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(now * gate_row) + tl.load(gate_bias).to(tl.float32)
        hazard = 1.0 / (1.0 + tl.exp(-logit))
        cumulative += hazard * survival
        tl.store(gate + slot * 2, survival * (1.0 - hazard))
        tl.store(gate + slot * 2 + 1, cumulative)
        told = statistics + row * 8

        if WATCH:
            now_norm = tl.sqrt(tl.sum(now * now))
            # a mask that the width divides keeps the loads wide
            before = tl.load(
                previous + row * previous_stride + columns, mask=columns < tl.where(count >= 1, width, 0), other=0.0
            ).to(tl.float32)
            before_norm = tl.sqrt(tl.sum(before * before))
            newest = tl.where(count >= 1, now - before, 0.0).to(dtype)
            ring = differences + slot * 4 * width + columns
            tl.store(ring + (loops % 4) * width, newest, mask=inside)
            d0 = newest.to(tl.float32)
            d1 = tl.load(ring + ((loops + 3) % 4) * width, mask=columns < tl.where(count >= 2, width, 0), other=0.0)
            d2 = tl.load(ring + ((loops + 2) % 4) * width, mask=columns < tl.where(count >= 3, width, 0), other=0.0)
            d3 = tl.load(ring + ((loops + 1) % 4) * width, mask=columns < tl.where(count >= 4, width, 0), other=0.0)
            g00, g01 = tl.sum(d0 * d0), tl.sum(d0 * d1.to(tl.float32))
            g02, g03 = tl.sum(d0 * d2.to(tl.float32)), tl.sum(d0 * d3.to(tl.float32))
            tl.store(kept, g00)
            tl.store(kept + 1, g01)
            tl.store(kept + 2, g02)
            tl.store(kept + 3, g03)
            tl.store(kept + 4, g11)
            tl.store(kept + 5, g12)
            tl.store(kept + 6, g13)
            tl.store(kept + 7, g22)
            tl.store(kept + 8, g23)
            tl.store(kept + 9, g33)
            size, older, change, bend, gain, grown, turning = steps_of_kernel(
                g00, g01, g11, g22, g33, before_norm, MODE == 4
            )
            radius, angle, residual, turns = fit_of_kernel(g00, g01, g02, g11, g12, g13, g22, g23, g33, count)
            fate = fate_of_kernel(
                size, grown, turning, radius, angle, residual, turns, count, now_norm, noise, growth, spiral
            )
            holds = (bend < threshold) & (loops >= 3)
            if MODE == 3:
                holds = holds & (size <= 0.9 * older)
            elif MODE != 4:
                holds = holds & (loops < 0)
            streak = tl.where(holds, streak + 1, 0)
            diverging = tl.where(fate == 3, diverging + 1, 0)
            remembered = ((remembered << 2) & 0x3FFFFFFF) | fate
            tl.store(told, change)
            tl.store(told + 1, bend)
            tl.store(told + 2, gain)
            tl.store(told + 3, turning)
            tl.store(told + 4, radius)
            tl.store(told + 5, angle)
            tl.store(told + 6, residual)
            tl.store(fates + row, fate)
            tl.store(mine + 1, streak)
            tl.store(mine + 2, diverging)
            tl.store(mine + 3, remembered)
            breaks = (break_after > 0) & (diverging >= break_after)
        else:
            breaks = loops < 0
            for place in tl.static_range(6):
                tl.store(told + place, 0.0)
            tl.store(told + 6, 1.0)
            tl.store(fates + row, 0)
        tl.store(told + 7, hazard)
        tl.store(mine, loops)

        if MODE == 1:
            met = cumulative >= threshold
        elif MODE == 2:
            met = (change < threshold) & (loops >= 2)
        elif MODE == 0:
            met = loops < 0
        else:
            met = streak >= patience
        met = met & (loops >= min_loops)
        late = tl.where(loops >= last_loop, 2, 0)
        tl.store(decisions + row, tl.where(met, 1, tl.where(breaks, 3, late)))
