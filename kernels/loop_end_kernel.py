# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""The end of a loop behind its norm in one launch of a Triton kernel: the formulas of `loop_end.py`, one program a row.

Mode and thresholds are read row by row, so that one launch serves any mixture of rules.
"""

import torch
from torch import Tensor

from sigma0.kernels import exit_state
from sigma0.kernels.exit_state import STATISTICS, ExitParams, ExitState, LoopEndOutput, LoopEndWeights, RuleRows
from sigma0.kernels.loop_end import SHRINK
from sigma0.kernels.row_product import launch_options
from sigma0.presence import wants_triton


def loop_end(
    hidden: Tensor,
    previous: Tensor,
    weights: LoopEndWeights,
    state: ExitState,
    slots: Tensor,
    params: ExitParams | RuleRows,
) -> LoopEndOutput:
    """`observe` and the gate in one launch of a Triton kernel; the norm has a launch of its own (`row_norm_kernel.py`).

    So the bits of a state do not depend on what is decided of it.

    Args:
        hidden: h_t `[R, D]`.
        previous: h_{t-1} `[R, D]`; not read in loop 1.
        weights: Weights of the gate.
        state: Written in place at `slots`.
        slots: State slot of each row, int64 `[R]`, all different.
        params: Parameters of the exit decision.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    rows, width = hidden.shape
    rules = RuleRows.of(params, rows, hidden.device) if isinstance(params, ExitParams) else params
    _check(hidden, previous, weights, state, slots)
    columns = _columns(rules, rows)
    statistics = torch.empty((rows, len(STATISTICS)), dtype=torch.float32, device=hidden.device)
    fates = torch.empty(rows, dtype=torch.int32, device=hidden.device)
    decisions = torch.empty_like(fates)
    if rows:
        block = triton.next_power_of_2(width)
        _loop_end_kernel[(rows,)](
            hidden,
            previous,
            hidden if weights.gate is None else weights.gate,
            hidden if weights.gate_bias is None else weights.gate_bias,
            state.differences,
            state.gram,
            state.gate,
            state.counts,
            slots,
            rules.threshold.contiguous(),
            *columns,
            statistics,
            fates,
            decisions,
            width,
            hidden.stride(0),
            previous.stride(0),
            columns[0].stride(0),
            rules.growth,
            rules.spiral,
            4 * torch.finfo(hidden.dtype).eps,
            WATCH=rules.watches,
            GATE=weights.gate is not None,
            BLOCK=block,
            num_warps=warps_for(block),
            **launch_options(hidden.device),
        )
    return LoopEndOutput(hidden, statistics, fates, decisions)


def warps_for(block: int) -> int:
    """Warps of a program: 8 numbers for each thread, so that half precision is read 16 bytes at a time."""
    return max(1, min(16, block // 256))


def _columns(rules: RuleRows, rows: int) -> list[Tensor]:
    """Mode, last loop, patience, first loop and break of each row, int64 `[R]`, all of one stride.

    Columns of one table, as the settings of sequences are gathered, are read where they lie.
    """
    columns = [rules.mode, rules.last_loop, rules.patience, rules.min_loops, rules.break_after]
    if any(tuple(column.shape) != (rows,) for column in (rules.threshold, *columns)):
        shapes = [tuple(column.shape) for column in (rules.threshold, *columns)]
        raise ValueError(f"{rows} rows need one threshold and one of each parameter, got {shapes}")
    if rules.threshold.dtype != torch.float32 or {column.dtype for column in columns} != {torch.int64}:
        dtypes = [column.dtype for column in (rules.threshold, *columns)]
        raise ValueError(f"thresholds are float32 and the other parameters int64, got {dtypes}")
    if len({column.stride(0) for column in columns}) > 1:
        columns = [column.contiguous() for column in columns]
    return columns


def _check(hidden: Tensor, previous: Tensor, weights: LoopEndWeights, state: ExitState, slots: Tensor) -> None:
    rows, width = hidden.shape
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {hidden.dtype}: use backend='torch'")
    if tuple(previous.shape) != (rows, width) or tuple(slots.shape) != (rows,):
        raise ValueError(f"{rows} rows of {width}, but previous {tuple(previous.shape)} and slots {tuple(slots.shape)}")
    given = [] if weights.gate is None else [weights.gate]
    if any(weight.numel() != width for weight in given) or state.differences.shape[2] != width:
        raise ValueError(f"rows of {width} numbers need a gate and differences of as many")
    if {previous.dtype, state.differences.dtype, *(weight.dtype for weight in given)} != {hidden.dtype}:
        raise ValueError("rows, gate and differences must share one dtype")
    contiguous = (*vars(state).values(), *given, slots)
    if hidden.stride(1) != 1 or previous.stride(1) != 1 or not all(part.is_contiguous() for part in contiguous):
        raise ValueError("the numbers of a row must lie side by side")


if wants_triton():
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
    _QEXIT, _CONVERGE = tl.constexpr(exit_state.QEXIT), tl.constexpr(exit_state.CONVERGE)
    _SHRINK = tl.constexpr(SHRINK)
    _ACCEL, _ACCEL_STEPS = tl.constexpr(exit_state.ACCEL), tl.constexpr(exit_state.ACCEL_STEPS)
    _NO_FATE, _DIVERGE = tl.constexpr(exit_state.NO_FATE), tl.constexpr(exit_state.DIVERGE)
    _GOES_ON, _MET = tl.constexpr(exit_state.GOES_ON), tl.constexpr(exit_state.MET)
    _LAST_LOOP, _DIVERGED = tl.constexpr(exit_state.LAST_LOOP), tl.constexpr(exit_state.DIVERGED)
    _STATISTICS = tl.constexpr(len(STATISTICS))

    # one program whether the parameters come out of a table or alone
    @triton.jit(do_not_specialize=["rule_stride"])
    def _loop_end_kernel(
        hidden_ptr,
        previous_ptr,
        gate_weight_ptr,
        gate_bias_ptr,
        differences_ptr,
        gram_ptr,
        gate_ptr,
        counts_ptr,
        slots_ptr,
        thresholds_ptr,
        modes_ptr,
        last_loops_ptr,
        patience_ptr,
        min_loops_ptr,
        break_after_ptr,
        statistics_ptr,
        fates_ptr,
        decisions_ptr,
        width,
        hidden_row_stride,
        previous_row_stride,
        rule_stride,
        growth,
        spiral,
        noise,
        WATCH: tl.constexpr,
        GATE: tl.constexpr,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        threshold = tl.load(thresholds_ptr + row)
        mode = tl.load(modes_ptr + row * rule_stride)
        last_loop = tl.load(last_loops_ptr + row * rule_stride)
        min_loops = tl.minimum(tl.load(min_loops_ptr + row * rule_stride), last_loop)
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
            patience = tl.load(patience_ptr + row * rule_stride)
            break_after = tl.load(break_after_ptr + row * rule_stride)
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

        now = tl.load(hidden_ptr + row * hidden_row_stride + offsets, mask=inside, other=0.0).to(tl.float32)
        hazard = 0.0
        if GATE:
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
                g00, g01, g11, g22, g33, before_norm, mode == _ACCEL_STEPS
            )
            radius, angle, residual, turns = fit_of_kernel(g00, g01, g02, g11, g12, g13, g22, g23, g33, count)
            fate = fate_of_kernel(
                size, grown, turning, radius, angle, residual, turns, count, now_norm, noise, growth, spiral
            )
            shrinks = (mode == _ACCEL) & (size <= _SHRINK * older)
            holds = (bend < threshold) & (loops >= 3) & (shrinks | (mode == _ACCEL_STEPS))
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

        met = (mode == _QEXIT) & (cumulative >= threshold)
        if WATCH:
            met = met | ((mode == _CONVERGE) & (change < threshold) & (loops >= 2))
            met = met | (((mode == _ACCEL) | (mode == _ACCEL_STEPS)) & (streak >= patience))
        met = met & (loops >= min_loops)
        late = tl.where(loops >= last_loop, _LAST_LOOP, _GOES_ON)
        tl.store(decisions_ptr + row, tl.where(met, _MET, tl.where(breaks, _DIVERGED, late)))
