# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Statistics from the ten numbers of a token's Gram matrix: size and turning of its steps, spectrum, fate.

With G_ij = <D_{t-i}, D_{t-j}> of the last K = 4 differences D_t = h_t - h_{t-1} of its loop states:

    change    |D_t| / |h_{t-1}|
    bend      |D_t - D_{t-1}| / |h_{t-1}|, or over |D_t| + |D_{t-1}| in the older form
    gain      |D_t| / |D_{t-1}|
    growth    |D_t| / max(|D_{t-1}|, |D_{t-2}|, |D_{t-3}|); one longer step after a path that shrank is none
    turning   the angle between D_t and D_{t-1}
    spectrum  D_s ~ a D_{s-1} + b D_{s-2} by least squares over the kept triples; radius and angle of the larger root
              of z^2 = a z + b, and the residual |D_s - a D_{s-1} - b D_{s-2}| / |D_s| over the same triples (dynamic
              mode decomposition of order 2). Where sin^2 between D_{t-1} and D_{t-2} is under 0.01, of order 1 instead.
              It counts where the residual is at most 0.5.
    fate      none with fewer than two differences; contract if |D_t| <= 4 eps(dtype) |h_t|; diverge if the growth is
              at least 1 + m, or the fit counts and its radius is; spiral if the turning is at least theta, or the fit
              counts and its roots are complex with an angle of at least theta, or the growth is at least 1; else
              contract

Where a quantity is not defined (no difference yet, a difference of length zero) it is 0, and the residual 1, so that
nothing is NaN; a quotient is at most 1e30.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.kernels.exit_state import CONTRACT, DIVERGE, G00, G01, G11, G22, G33, KEPT, NO_FATE, SPIRAL
from sigma0.presence import wants_triton

# sin^2 of the angle under which two differences count as parallel, and the residual up to which a fit counts.
PARALLEL, MAX_RESIDUAL = 0.01, 0.5
# Added to a denominator so that 0 over 0 is 0, too small to change a larger float32; and the bound on a quotient.
TINY, MAX_QUOTIENT = 1e-37, 1e30


@dataclass(frozen=True)
class Steps:
    """Sizes and angles, each float32 `[R]`."""

    size: Tensor  # |D_t|
    older: Tensor  # |D_{t-1}|
    change: Tensor  # |D_t| / |h_{t-1}|
    bend: Tensor  # Relative second difference
    gain: Tensor  # |D_t| / |D_{t-1}|
    growth: Tensor  # |D_t| over the longest of the three steps before
    turning: Tensor  # Radians


@dataclass(frozen=True)
class Fit:
    """The spectrum, each float32 `[R]` but `turns`."""

    radius: Tensor  # Of the larger root; 0 without a fit
    angle: Tensor  # Of the larger root, radians in [0, pi]
    residual: Tensor  # Of the fit, in [0, 1]; 1 without one
    turns: Tensor  # Whether the roots are complex, bool


def steps_of(gram: Tensor, before: Tensor, over_steps: Tensor | bool) -> Steps:
    """Sizes and angles.

    Args:
        gram: `[R, 10]`; differences that do not exist count as zero.
        before: |h_{t-1}| `[R]`.
        over_steps: The older form of `bend`; bool, or bool `[R]`.
    """
    g00, g01, g11 = gram[:, G00], gram[:, G01], gram[:, G11]
    size, older = g00.sqrt(), g11.sqrt()
    known = (older > 0).float()
    bend = (g00 - 2 * g01 + g11).clamp_min(0).sqrt()
    both = size * older
    turning = torch.acos((g01 / (both + TINY)).clamp(-1, 1)) * (both > 0)
    if isinstance(over_steps, Tensor):
        scale = torch.where(over_steps, size + older, before)
    else:
        scale = size + older if over_steps else before
    change, scaled = _over(size, before), _over(bend, scale)
    longest = torch.maximum(g11, torch.maximum(gram[:, G22], gram[:, G33])).sqrt()
    growth = _over(size, longest) * (longest > 0)
    return Steps(size, older, change, scaled * known, _over(size, older) * known, growth, turning)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator / (denominator + TINY)).clamp_max(MAX_QUOTIENT)


def fit_of(gram: Tensor, count: Tensor) -> Fit:
    """The spectrum.

    Args:
        gram: `[R, 10]`; differences that do not exist count as zero.
        count: Differences so far, int32 `[R]`.
    """
    g00, g01, g02, _, g11, g12, g13, g22, g23, g33 = gram.unbind(-1)
    # The newest triple, and the one before it where four differences are kept; else its numbers are zero.
    two = (count >= KEPT).float()
    p11, p12, p22 = g11 + two * g22, g12 + two * g23, g22 + two * g33
    r1, r2 = g01 + two * g12, g02 + two * g13
    both = g11 * g22
    first = (count == 2) | (both - g12 * g12 < PARALLEL * both) | (p11 * p22 - p12 * p12 <= 0)
    whole = g00 + (two * g11).masked_fill(first, 0.0)
    none = (count < 2) | (g11 <= 0) | (whole <= 0)
    return solve(first, none, p11, p12, p22, torch.where(first, g01, r1), r2, g11, whole)


def solve(
    first: Tensor,
    none: Tensor,
    p11: Tensor,
    p12: Tensor,
    p22: Tensor,
    r1: Tensor,
    r2: Tensor,
    g11: Tensor,
    whole: Tensor,
) -> Fit:
    """The spectrum out of the sums of the normal equations.

    Args:
        first: Whether the fit is of order 1, bool `[R]`.
        none: Whether there is none, bool `[R]`.
        p11: Sum of <D_{s-1}, D_{s-1}> over the triples, `[R]`.
        p12: Sum of <D_{s-1}, D_{s-2}> over the triples, `[R]`.
        p22: Sum of <D_{s-2}, D_{s-2}> over the triples, `[R]`.
        r1: Sum of <D_s, D_{s-1}>, `[R]`; of the newest pair alone where the order is 1.
        r2: Sum of <D_s, D_{s-2}> over the triples, `[R]`.
        g11: <D_{t-1}, D_{t-1}>, `[R]`.
        whole: Sum of <D_s, D_s>, `[R]`; of the newest alone where the order is 1.
    """
    safe = (p11 * p22 - p12 * p12).masked_fill(first, 1.0)
    a = torch.where(first, r1 / (g11 + TINY), (r1 * p22 - r2 * p12) / safe)
    b = ((r2 * p11 - r1 * p12) / safe).masked_fill(first, 0.0)
    explained = a * r1 + b * r2
    discriminant = a * a + 4 * b
    turns = discriminant < 0
    far = (-b).clamp_min(0).sqrt()
    radius = torch.where(turns, far, (a.abs() + discriminant.clamp_min(0).sqrt()) / 2)
    angle = torch.where(turns, torch.acos((a / (2 * far + TINY)).clamp(-1, 1)), (a < 0) * math.pi)
    residual = ((whole - explained).clamp_min(0) / (whole + TINY)).sqrt().clamp_max(1.0)
    return Fit(
        radius.clamp_max(MAX_QUOTIENT).masked_fill(none, 0.0),
        angle.masked_fill(none, 0.0),
        residual.masked_fill(none, 1.0),
        turns & ~none,
    )


def fate_of(
    steps: Steps, fit: Fit, count: Tensor, norm: Tensor, dtype: torch.dtype, growth: float, spiral: float
) -> Tensor:
    """Index into `exit_state.FATES`, int32 `[R]`.

    Args:
        steps: Sizes and angles.
        fit: The spectrum.
        count: Differences so far, int32 `[R]`.
        norm: |h_t| `[R]`.
        dtype: Of the states, for the size of their rounding noise.
        growth: m.
        spiral: theta, radians.
    """
    fits = (fit.residual <= MAX_RESIDUAL) & (count >= 3)
    diverges = (steps.growth >= 1 + growth) | (fits & (fit.radius >= 1 + growth))
    spirals = (steps.turning >= spiral) | (fits & fit.turns & (fit.angle >= spiral)) | (steps.growth >= 1)
    fate = torch.full_like(count, CONTRACT).masked_fill(spirals, SPIRAL).masked_fill(diverges, DIVERGE)
    fate = fate.masked_fill(steps.size <= 4 * torch.finfo(dtype).eps * norm, CONTRACT)
    return fate.masked_fill(count < 2, NO_FATE)


if wants_triton():
    import triton
    import triton.language as tl

    # A kernel reads no global but constexprs: the constants above, for it.
    _NO_FATE, _CONTRACT = tl.constexpr(NO_FATE), tl.constexpr(CONTRACT)
    _SPIRAL, _DIVERGE = tl.constexpr(SPIRAL), tl.constexpr(DIVERGE)
    _KEPT, _PARALLEL, _MAX_RESIDUAL = tl.constexpr(KEPT), tl.constexpr(PARALLEL), tl.constexpr(MAX_RESIDUAL)
    _TINY_DENOMINATOR, _MAX_QUOTIENT, _PI = tl.constexpr(TINY), tl.constexpr(MAX_QUOTIENT), tl.constexpr(math.pi)

    @triton.jit
    def acos(x):  # noqa: D103
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
        return tl.where(x < 0, _PI - p, p)

    @triton.jit
    def over(numerator, denominator):  # noqa: D103
        return tl.minimum(numerator / (denominator + _TINY_DENOMINATOR), _MAX_QUOTIENT)

    @triton.jit
    def clamp(x):  # noqa: D103
        return tl.minimum(tl.maximum(x, -1.0), 1.0)

    @triton.jit
    def steps_of_kernel(g00, g01, g11, g22, g33, before, over_steps):
        """`steps_of` of one row."""
        size, older = tl.sqrt(g00), tl.sqrt(g11)
        bend = tl.sqrt(tl.maximum(g00 - 2 * g01 + g11, 0.0))
        bend = over(bend, tl.where(over_steps, size + older, before))
        both = size * older
        turning = tl.where(both > 0, acos(clamp(g01 / (both + _TINY_DENOMINATOR))), 0.0)
        gain = tl.where(older > 0, over(size, older), 0.0)
        longest = tl.sqrt(tl.maximum(g11, tl.maximum(g22, g33)))
        grown = tl.where(longest > 0, over(size, longest), 0.0)
        return size, older, over(size, before), tl.where(older > 0, bend, 0.0), gain, grown, turning

    @triton.jit
    def fit_of_kernel(g00, g01, g02, g11, g12, g13, g22, g23, g33, count):
        """`fit_of` of one row."""
        two = tl.where(count >= _KEPT, 1.0, 0.0)
        p11, p12, p22 = g11 + two * g22, g12 + two * g23, g22 + two * g33
        r1, r2 = g01 + two * g12, g02 + two * g13
        both = g11 * g22
        determinant = p11 * p22 - p12 * p12
        first = (count == 2) | (both - g12 * g12 < _PARALLEL * both) | (determinant <= 0)
        safe = tl.where(first, 1.0, determinant)
        a = tl.where(first, g01 / (g11 + _TINY_DENOMINATOR), (r1 * p22 - r2 * p12) / safe)
        b = tl.where(first, 0.0, (r2 * p11 - r1 * p12) / safe)
        explained = a * tl.where(first, g01, r1) + b * r2
        whole = g00 + tl.where(first, 0.0, two * g11)
        discriminant = a * a + 4 * b
        turns = discriminant < 0
        far = tl.sqrt(tl.maximum(-b, 0.0))
        radius = tl.where(turns, far, (tl.abs(a) + tl.sqrt(tl.maximum(discriminant, 0.0))) / 2)
        angle = tl.where(turns, acos(clamp(a / (2 * far + _TINY_DENOMINATOR))), tl.where(a < 0, _PI, 0.0))
        residual = tl.minimum(tl.sqrt(tl.maximum(whole - explained, 0.0) / (whole + _TINY_DENOMINATOR)), 1.0)
        fits = (count >= 2) & (g11 > 0) & (whole > 0)
        radius = tl.where(fits, tl.minimum(radius, _MAX_QUOTIENT), 0.0)
        return radius, tl.where(fits, angle, 0.0), tl.where(fits, residual, 1.0), turns & fits

    @triton.jit
    def fate_of_kernel(size, grown, turning, radius, angle, residual, turns, count, norm, noise, growth, spiral):
        """`fate_of` of one row; `noise` is 4 eps(dtype)."""
        fits = (residual <= _MAX_RESIDUAL) & (count >= 3)
        diverges = (grown >= 1 + growth) | (fits & (radius >= 1 + growth))
        spirals = (turning >= spiral) | (fits & turns & (angle >= spiral)) | (grown >= 1)
        fate = tl.where(diverges, _DIVERGE, tl.where(spirals, _SPIRAL, _CONTRACT))
        fate = tl.where(size <= noise * norm, _CONTRACT, fate)
        return tl.where(count >= 2, fate, _NO_FATE)
