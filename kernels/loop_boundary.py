"""The end of a loop, for all rows at once: norm, gate, differences, their Gram matrix, what it tells, and the exit.

For a row that has just finished loop t, with x the output of the block, h_t its norm and D_t = h_t - h_{t-1} (t >= 2):

    hazard    l_t = sigmoid(gate(h_t)),  CDF_t = CDF_{t-1} + l_t S_{t-1},  S_t = S_{t-1} (1 - l_t)
    Gram      G_ij = <D_{t-i}, D_{t-j}>, i, j < K = 4: one new row for each loop
    change    |D_t| / |h_{t-1}|                        `converge` is met where it is under eps
    bend      |D_t - D_{t-1}| / |h_{t-1}|              `accel` is met where it is under eps and |D_t| <= 0.9 |D_{t-1}|,
                                                       on `patience` loops running (arXiv 2509.23314); `accel-steps`
                                                       divides by |D_t| + |D_{t-1}| instead and asks for no shrinking
    gain      |D_t| / |D_{t-1}|
    turning   the angle between D_t and D_{t-1}
    spectrum  D_s ~ a D_{s-1} + b D_{s-2} by least squares over the kept triples; radius and angle of the larger root
              of z^2 = a z + b, and the residual |D_s - a D_{s-1} - b D_{s-2}| / |D_s| over the same triples (dynamic
              mode decomposition of order 2). Where sin^2 between D_{t-1} and D_{t-2} is under 0.01, of order 1 instead.
              It speaks where the residual is at most 0.5.
    fate      none with fewer than two differences; contract if |D_t| <= 4 eps(dtype) |h_t|; diverge if the gain is at
              least 1 + m, or the fit speaks and its radius is; spiral if the turning is at least theta, or the fit
              speaks and its roots are complex with an angle of at least theta, or the gain is at least 1; else contract

Everything from `change` on is arithmetic on ten numbers of G. Where a quantity is not defined (no difference yet, a
difference of length zero) it is 0, and the residual 1, so that nothing is NaN.

Bytes for each row, with D numbers of b bytes: read x, h_{t-1} and three differences, write h_t and D_t: 7 D b, of which
none can be left out while differences are kept; weight and gate (2 D b) are shared by all rows and stay in the cache.
"""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from sigma0.kernels.boundary import (
    ANGLE,
    BEND,
    CHANGE,
    CUMULATIVE,
    DIVERGED,
    DIVERGING,
    GAIN,
    GOES_ON,
    KEPT,
    LAST_LOOP,
    LOOPS,
    MET,
    MODES,
    RADIUS,
    REMEMBERED,
    RESIDUAL,
    STREAK,
    SURVIVAL,
    TURNING,
    Boundary,
    BoundaryRule,
    BoundaryState,
)

# sin^2 of the angle under which two differences count as parallel, and the residual up to which a fit speaks.
_PARALLEL, _SPEAKS = 0.01, 0.5
_HUGE = 1e30


def loop_boundary_reference(
    raw: Tensor,
    previous: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    state: BoundaryState,
    slots: Tensor,
    rule: BoundaryRule,
) -> Boundary:
    """The formulas above in plain torch; what a CPU runs.

    Args:
        raw: x `[R, D]`.
        previous: h_{t-1} `[R, D]`; not looked at in loop 1.
        weight: Of the RMSNorm `[D]`.
        gate_weight: `[D]`.
        gate_bias: `[1]`.
        state: Written in place at `slots`.
        slots: Slot of each row, int64 `[R]`, none twice.
        rule: What decides.
    """
    hidden = _normed(raw, weight, rule)  # [R, D]
    now, before = hidden.float(), previous.float()
    loops = state.counts[slots, LOOPS].long() + 1  # [R]
    fresh = loops == 1
    hazard = torch.sigmoid(now @ gate_weight.float() + gate_bias.float())  # [R]
    survival = torch.where(fresh, 1.0, state.gate[slots, SURVIVAL])
    cumulative = torch.where(fresh, 0.0, state.gate[slots, CUMULATIVE]) + hazard * survival
    survival = survival * (1.0 - hazard)
    difference = torch.where(fresh[:, None], 0.0, now - before).to(raw.dtype)  # [R, D]
    state.differences[slots, loops % KEPT] = difference
    gram = _grown_gram(state, slots, loops, difference.float())  # [R, K, K]
    before_norm = torch.where(fresh, 0.0, torch.linalg.vector_norm(before, dim=-1))
    statistics = torch.stack([*_steps(gram, before_norm, rule), *_spectrum(gram, loops - 1), hazard], dim=-1)
    fates = _fates(gram, loops - 1, torch.linalg.vector_norm(now, dim=-1), statistics, raw.dtype, rule)
    counts = state.counts[slots]
    streak = torch.where(_holds(gram, statistics, loops, rule), torch.where(fresh, 0, counts[:, STREAK]) + 1, 0)
    diverging = torch.where(fates == 3, torch.where(fresh, 0, counts[:, DIVERGING]) + 1, 0)
    remembered = (torch.where(fresh, 0, counts[:, REMEMBERED]) << 2) & 0x3FFFFFFF | fates
    state.gram[slots], state.gate[slots] = gram, torch.stack([survival, cumulative], dim=-1)
    state.counts[slots] = torch.stack([loops, streak, diverging, remembered], dim=-1).int()
    decisions = _decided(statistics, cumulative, loops, streak, diverging, rule)
    return Boundary(hidden, statistics, fates.int(), decisions.int())


def _normed(raw: Tensor, weight: Tensor, rule: BoundaryRule) -> Tensor:
    """RMSNorm, rounded to the model's dtype before and behind the weight as transformers' modules do."""
    if not rule.normalize:
        return raw
    wide = raw.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rule.norm_eps)
    return weight * (wide * scale).to(raw.dtype)


def _grown_gram(state: BoundaryState, slots: Tensor, loops: Tensor, difference: Tensor) -> Tensor:
    """G with the row of the newest difference; differences that do not exist count as zero."""
    ages = torch.arange(KEPT, device=slots.device)
    ring = (loops[:, None] - ages) % KEPT  # [R, K]
    exists = ages < (loops - 1)[:, None]
    kept = torch.where(exists[..., None], state.differences[slots[:, None], ring].float(), 0.0)  # [R, K, D]
    row = (kept * difference[:, None]).sum(-1)  # [R, K]
    gram = torch.zeros((len(slots), KEPT, KEPT), dtype=torch.float32, device=slots.device)
    older = exists[:, 1:, None] & exists[:, None, 1:]
    gram[:, 1:, 1:] = torch.where(older, state.gram[slots, : KEPT - 1, : KEPT - 1], 0.0)
    gram[:, 0], gram[:, :, 0] = row, row
    return gram


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A quotient that is 0 where 0 is divided by 0, and at most 1e30."""
    quotient = numerator / torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, quotient, torch.where(numerator > 0, _HUGE, 0.0)).clamp_max(_HUGE)


def _steps(gram: Tensor, before_norm: Tensor, rule: BoundaryRule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """change, bend, gain and turning, each `[R]`."""
    size, older = gram[:, 0, 0].sqrt(), gram[:, 1, 1].sqrt()
    bend = (gram[:, 0, 0] - 2 * gram[:, 0, 1] + gram[:, 1, 1]).clamp_min(0).sqrt()
    scale = size + older if rule.mode == "accel-steps" else before_norm
    cosine = (gram[:, 0, 1] / torch.where(size * older > 0, size * older, 1.0)).clamp(-1, 1)
    turning = torch.where(size * older > 0, torch.acos(cosine), 0.0)
    known = older > 0
    return _over(size, before_norm), torch.where(known, _over(bend, scale), 0.0), _over(size, older) * known, turning


def _spectrum(gram: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """radius, angle and residual of the fit, each `[R]`; 0, 0 and 1 where there is none."""
    # The newest triple, and the one before it where four differences are kept.
    two = (count >= 4).float()
    p11 = gram[:, 1, 1] + two * gram[:, 2, 2]
    p12 = gram[:, 1, 2] + two * gram[:, 2, 3]
    p22 = gram[:, 2, 2] + two * gram[:, 3, 3]
    r1 = gram[:, 0, 1] + two * gram[:, 1, 2]
    r2 = gram[:, 0, 2] + two * gram[:, 1, 3]
    total = gram[:, 0, 0] + two * gram[:, 1, 1]
    both = gram[:, 1, 1] * gram[:, 2, 2]
    parallel = both - gram[:, 1, 2] ** 2 < _PARALLEL * both
    determinant = p11 * p22 - p12**2
    first = (count == 2) | parallel | (determinant <= 0)
    safe = torch.where(first, 1.0, determinant)
    a = torch.where(first, _signed_over(gram[:, 0, 1], gram[:, 1, 1]), (r1 * p22 - r2 * p12) / safe)
    b = torch.where(first, 0.0, (r2 * p11 - r1 * p12) / safe)
    explained = torch.where(first, a * gram[:, 0, 1], a * r1 + b * r2)
    whole = torch.where(first, gram[:, 0, 0], total)
    discriminant = a * a + 4 * b
    root = discriminant.clamp_min(0).sqrt()
    complex_radius = (-b).clamp_min(0).sqrt()
    radius = torch.where(discriminant >= 0, (a.abs() + root) / 2, complex_radius)
    cosine = (a / torch.where(complex_radius > 0, 2 * complex_radius, 1.0)).clamp(-1, 1)
    angle = torch.where(discriminant >= 0, torch.where(a < 0, math.pi, 0.0), torch.acos(cosine))
    residual = ((whole - explained).clamp_min(0) / torch.where(whole > 0, whole, 1.0)).sqrt().clamp_max(1.0)
    fits = (count >= 2) & (gram[:, 1, 1] > 0) & (whole > 0)
    return (
        torch.where(fits, radius.clamp_max(_HUGE), 0.0),
        torch.where(fits, angle, 0.0),
        torch.where(fits, residual, 1.0),
    )


def _signed_over(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / torch.where(denominator > 0, denominator, 1.0)


def _fates(
    gram: Tensor, count: Tensor, norm: Tensor, statistics: Tensor, dtype: torch.dtype, rule: BoundaryRule
) -> Tensor:
    """Index into `FATES`, int64 `[R]`."""
    noise = gram[:, 0, 0].sqrt() <= 4 * torch.finfo(dtype).eps * norm
    gain, turning = statistics[:, GAIN], statistics[:, TURNING]
    speaks = (statistics[:, RESIDUAL] <= _SPEAKS) & (count >= 3)
    radius, angle = statistics[:, RADIUS], statistics[:, ANGLE]
    diverges = (gain >= 1 + rule.growth) | (speaks & (radius >= 1 + rule.growth))
    turns = speaks & (angle >= rule.spiral) & (angle < math.pi)
    spirals = (turning >= rule.spiral) | turns | (gain >= 1)
    fate = torch.where(noise, 1, torch.where(diverges, 3, torch.where(spirals, 2, 1)))
    return torch.where(count >= 2, fate, 0)


def _holds(gram: Tensor, statistics: Tensor, loops: Tensor, rule: BoundaryRule) -> Tensor:
    """Whether `accel` holds at this loop, bool `[R]`."""
    close = (statistics[:, BEND] < rule.threshold) & (loops >= 3)
    if rule.mode == "accel":
        return close & (gram[:, 0, 0].sqrt() <= 0.9 * gram[:, 1, 1].sqrt())
    return close if rule.mode == "accel-steps" else torch.zeros_like(close)


def _decided(
    statistics: Tensor, cumulative: Tensor, loops: Tensor, streak: Tensor, diverging: Tensor, rule: BoundaryRule
) -> Tensor:
    met = torch.zeros_like(loops, dtype=torch.bool)
    if rule.mode == "qexit" and rule.threshold < 1:
        met = cumulative >= rule.threshold
    elif rule.mode == "converge":
        met = (statistics[:, CHANGE] < rule.threshold) & (loops >= 2)
    elif rule.mode in ("accel", "accel-steps"):
        met = streak >= rule.patience
    met = met & (loops >= min(rule.min_loops, rule.last_loop))
    breaks = (diverging >= rule.break_after) if rule.break_after else torch.zeros_like(met)
    late = torch.where(loops >= rule.last_loop, LAST_LOOP, GOES_ON)
    return torch.where(met, MET, torch.where(breaks, DIVERGED, late))


def loop_boundary(
    raw: Tensor,
    previous: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    state: BoundaryState,
    slots: Tensor,
    rule: BoundaryRule,
) -> Boundary:
    """`loop_boundary_reference` in one launch of a Triton kernel.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not take.
    """
    rows, width = raw.shape
    _check(raw, previous, weight, gate_weight, state, slots)
    hidden = torch.empty((rows, width), dtype=raw.dtype, device=raw.device)
    statistics = torch.empty((rows, 8), dtype=torch.float32, device=raw.device)
    fates = torch.empty(rows, dtype=torch.int32, device=raw.device)
    decisions = torch.empty_like(fates)
    if rows:
        block = triton.next_power_of_2(width)
        _loop_boundary_kernel[(rows,)](
            raw,
            previous,
            weight,
            gate_weight,
            gate_bias,
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
            rule.norm_eps,
            4 * torch.finfo(raw.dtype).eps,
            rule.last_loop,
            rule.patience,
            min(rule.min_loops, rule.last_loop),
            rule.break_after,
            MODE=MODES.index(rule.mode) if rule.mode != "qexit" or rule.threshold < 1 else 0,
            NORMALIZE=rule.normalize,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return Boundary(hidden, statistics, fates, decisions)


def warps_for(block: int) -> int:
    """Warps of a program: 8 numbers for each thread, so that half precision is read 16 bytes at a time."""
    return max(1, min(16, block // 256))


def _check(
    raw: Tensor, previous: Tensor, weight: Tensor, gate_weight: Tensor, state: BoundaryState, slots: Tensor
) -> None:
    rows, width = raw.shape
    if raw.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {raw.dtype}")
    if tuple(previous.shape) != (rows, width) or tuple(slots.shape) != (rows,):
        raise ValueError(f"{rows} rows of {width}, but previous {tuple(previous.shape)} and slots {tuple(slots.shape)}")
    if tuple(weight.shape) != (width,) or gate_weight.numel() != width or state.differences.shape[2] != width:
        raise ValueError(f"rows of {width} numbers need a weight, a gate and differences of as many")
    if {previous.dtype, weight.dtype, gate_weight.dtype, state.differences.dtype} != {raw.dtype}:
        raise ValueError("rows, weight, gate and differences must share one dtype")
    if raw.stride(1) != 1 or previous.stride(1) != 1 or not state.differences.is_contiguous():
        raise ValueError("the numbers of a row must lie side by side")


if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _acos(x):
        # Abramowitz and Stegun 4.4.46: error at most 2e-8; Triton has no acos of its own.
        y = tl.abs(x)
        p = -0.0012624911
        p = p * y + 0.0066700901
        p = p * y - 0.0170881256
        p = p * y + 0.0308918810
        p = p * y - 0.0501743046
        p = p * y + 0.0889789874
        p = p * y - 0.2145988016
        p = p * y + 1.5707963050
        p = p * tl.sqrt(tl.maximum(1.0 - y, 0.0))
        return tl.where(x < 0, 3.141592653589793 - p, p)

    @triton.jit
    def _quotient(numerator, denominator):
        quotient = numerator / tl.where(denominator > 0, denominator, 1.0)
        return tl.minimum(tl.where(denominator > 0, quotient, tl.where(numerator > 0, 1e30, 0.0)), 1e30)

    @triton.jit
    def _clamp(x):
        return tl.minimum(tl.maximum(x, -1.0), 1.0)

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
        NORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + row).to(tl.int64)
        loops = tl.load(counts + slot * 4) + 1
        count = loops - 1
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
        now_norm = tl.sqrt(tl.sum(now * now))

        before = tl.load(
            previous + row * previous_stride + columns, mask=columns < tl.where(count >= 1, width, 0), other=0.0
        ).to(tl.float32)
        before_norm = tl.sqrt(tl.sum(before * before))
        newest = tl.where(count >= 1, now - before, 0.0).to(dtype)
        ring = differences + slot * 4 * width + columns
        tl.store(ring + (loops % 4) * width, newest, mask=inside)
        d0 = newest.to(tl.float32)
        d1 = tl.load(ring + ((loops + 3) % 4) * width, mask=columns < tl.where(count >= 2, width, 0), other=0.0).to(
            tl.float32
        )
        d2 = tl.load(ring + ((loops + 2) % 4) * width, mask=columns < tl.where(count >= 3, width, 0), other=0.0).to(
            tl.float32
        )
        d3 = tl.load(ring + ((loops + 1) % 4) * width, mask=columns < tl.where(count >= 4, width, 0), other=0.0).to(
            tl.float32
        )
        g00, g01, g02, g03 = tl.sum(d0 * d0), tl.sum(d0 * d1), tl.sum(d0 * d2), tl.sum(d0 * d3)
        kept = gram + slot * 16
        g11 = tl.load(kept, mask=count >= 2, other=0.0)
        g12 = tl.load(kept + 1, mask=count >= 3, other=0.0)
        g13 = tl.load(kept + 2, mask=count >= 4, other=0.0)
        g22 = tl.load(kept + 5, mask=count >= 3, other=0.0)
        g23 = tl.load(kept + 6, mask=count >= 4, other=0.0)
        g33 = tl.load(kept + 10, mask=count >= 4, other=0.0)
        tl.store(kept, g00)
        tl.store(kept + 1, g01)
        tl.store(kept + 2, g02)
        tl.store(kept + 3, g03)
        tl.store(kept + 4, g01)
        tl.store(kept + 5, g11)
        tl.store(kept + 6, g12)
        tl.store(kept + 7, g13)
        tl.store(kept + 8, g02)
        tl.store(kept + 9, g12)
        tl.store(kept + 10, g22)
        tl.store(kept + 11, g23)
        tl.store(kept + 12, g03)
        tl.store(kept + 13, g13)
        tl.store(kept + 14, g23)
        tl.store(kept + 15, g33)

        hazard = 1.0 / (1.0 + tl.exp(-logit))
        survival = tl.load(gate + slot * 2, mask=count >= 1, other=1.0)
        cumulative = tl.load(gate + slot * 2 + 1, mask=count >= 1, other=0.0) + hazard * survival
        tl.store(gate + slot * 2, survival * (1.0 - hazard))
        tl.store(gate + slot * 2 + 1, cumulative)

        size, older = tl.sqrt(g00), tl.sqrt(g11)
        change = _quotient(size, before_norm)
        curved = tl.sqrt(tl.maximum(g00 - 2 * g01 + g11, 0.0))
        bend = _quotient(curved, size + older) if MODE == 4 else _quotient(curved, before_norm)
        bend = tl.where(older > 0, bend, 0.0)
        gain = tl.where(older > 0, _quotient(size, older), 0.0)
        both_sizes = size * older
        cosine = _clamp(g01 / tl.where(both_sizes > 0, both_sizes, 1.0))
        turning = tl.where(both_sizes > 0, _acos(cosine), 0.0)

        two = tl.where(count >= 4, 1.0, 0.0)
        p11, p12, p22 = g11 + two * g22, g12 + two * g23, g22 + two * g33
        r1, r2, total = g01 + two * g12, g02 + two * g13, g00 + two * g11
        both = g11 * g22
        determinant = p11 * p22 - p12 * p12
        first = (count == 2) | (both - g12 * g12 < 0.01 * both) | (determinant <= 0)
        safe = tl.where(first, 1.0, determinant)
        a = tl.where(first, g01 / tl.where(g11 > 0, g11, 1.0), (r1 * p22 - r2 * p12) / safe)
        b = tl.where(first, 0.0, (r2 * p11 - r1 * p12) / safe)
        explained = tl.where(first, a * g01, a * r1 + b * r2)
        whole = tl.where(first, g00, total)
        discriminant = a * a + 4 * b
        complex_radius = tl.sqrt(tl.maximum(-b, 0.0))
        real_radius = (tl.abs(a) + tl.sqrt(tl.maximum(discriminant, 0.0))) / 2
        radius = tl.where(discriminant >= 0, real_radius, complex_radius)
        root_cosine = _clamp(a / tl.where(complex_radius > 0, 2 * complex_radius, 1.0))
        real_angle = tl.where(a < 0, 3.141592653589793, 0.0)
        angle = tl.where(discriminant >= 0, real_angle, _acos(root_cosine))
        left = tl.maximum(whole - explained, 0.0) / tl.where(whole > 0, whole, 1.0)
        fits = (count >= 2) & (g11 > 0) & (whole > 0)
        radius = tl.where(fits, tl.minimum(radius, 1e30), 0.0)
        angle = tl.where(fits, angle, 0.0)
        residual = tl.where(fits, tl.minimum(tl.sqrt(left), 1.0), 1.0)

        speaks = (residual <= 0.5) & (count >= 3)
        diverges = (gain >= 1 + growth) | (speaks & (radius >= 1 + growth))
        turns = speaks & (angle >= spiral) & (discriminant < 0)
        spirals = (turning >= spiral) | turns | (gain >= 1)
        fate = tl.where(size <= noise * now_norm, 1, tl.where(diverges, 3, tl.where(spirals, 2, 1)))
        fate = tl.where(count >= 2, fate, 0)

        holds = (bend < threshold) & (loops >= 3)
        if MODE == 3:
            holds = holds & (size <= 0.9 * older)
        elif MODE != 4:
            holds = holds & (loops < 0)
        streak = tl.where(holds, tl.load(counts + slot * 4 + 1, mask=count >= 1, other=0) + 1, 0)
        diverging = tl.where(fate == 3, tl.load(counts + slot * 4 + 2, mask=count >= 1, other=0) + 1, 0)
        remembered = tl.load(counts + slot * 4 + 3, mask=count >= 1, other=0)
        tl.store(counts + slot * 4, loops)
        tl.store(counts + slot * 4 + 1, streak)
        tl.store(counts + slot * 4 + 2, diverging)
        tl.store(counts + slot * 4 + 3, ((remembered << 2) & 0x3FFFFFFF) | fate)

        if MODE == 1:
            met = cumulative >= threshold
        elif MODE == 2:
            met = (change < threshold) & (loops >= 2)
        elif MODE == 0:
            met = loops < 0
        else:
            met = streak >= patience
        met = met & (loops >= min_loops)
        breaks = (break_after > 0) & (diverging >= break_after)
        late = tl.where(loops >= last_loop, 2, 0)
        tl.store(decisions + row, tl.where(met, 1, tl.where(breaks, 3, late)))
        tl.store(fates + row, fate)
        told = statistics + row * 8
        tl.store(told, change)
        tl.store(told + 1, bend)
        tl.store(told + 2, gain)
        tl.store(told + 3, turning)
        tl.store(told + 4, radius)
        tl.store(told + 5, angle)
        tl.store(told + 6, residual)
        tl.store(told + 7, hazard)
