# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""What stands between two products of a pass: RMS norms and the residual, in Triton.

    row_norm        y = r + n(x),   n(x) = w round(x / sqrt(mean(x^2) + epsilon))
    row_residual    r' = r + n(y),  x' = n'(r'),   y = sum_s y_s the parts of a product, n and n' norms or nothing

rounded to the model's dtype where transformers' modules round: after the product, the scale, the weight and the sum.
One program has one row, and adds its parts and its squares up in one order. Bytes for each row: 3 D b, of
`row_residual` (4 S + 3 b) D; and the weights.
"""

import torch
from torch import Tensor

from sigma0.kernels.operators import row_op
from sigma0.kernels.row_product import check_norm, norm_reference, start
from sigma0.presence import wants_triton

# The widest row that a program holds.
WIDEST = 16384


def row_norm_reference(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """The formula in plain torch.

    Args:
        hidden: x `[R, D]`.
        weight: w `[D]`.
        epsilon: Added to the mean square.
        residual: r `[R, D]`; None for none.

    Returns:
        y, `[R, D]`.
    """
    normed = norm_reference(hidden, weight, epsilon)
    return normed if residual is None else residual + normed


def _output_shape(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    return hidden.new_empty(hidden.shape)


@row_op(_output_shape)
def row_norm(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """`row_norm_reference` in one launch.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    check_norm(hidden, weight)
    rows, width = hidden.shape
    added = hidden if residual is None else residual
    if width > WIDEST or added.shape != hidden.shape or hidden.stride(1) != 1 or added.stride(1) != 1:
        raise ValueError(f"no norm of rows {tuple(hidden.shape)} added to {tuple(added.shape)}, up to {WIDEST} numbers")
    if {weight.dtype, added.dtype} != {hidden.dtype}:
        raise ValueError(f"the kernel takes one dtype, not {[part.dtype for part in (hidden, weight, added)]}")
    output = torch.empty((rows, width), dtype=hidden.dtype, device=hidden.device)
    if rows:
        block = triton.next_power_of_2(width)
        start(
            _row_norm_kernel,
            (rows,),
            hidden,
            hidden,
            weight,
            added,
            output,
            width,
            hidden.stride(0),
            added.stride(0),
            epsilon,
            RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=norm_warps(block),
        )
    return output


def row_residual_reference(
    parts: Tensor, after: Tensor | None, residual: Tensor, ahead: Tensor | None, epsilons: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The formula in plain torch.

    Args:
        parts: y_s, float32 `[S, R, D]`.
        after: Weight of n, `[D]`; None for none.
        residual: r `[R, D]`.
        ahead: Weight of n', `[D]`; None where x' is not wanted.
        epsilons: Of n and of n'.

    Returns:
        r' and x', `[R, D]`; r' twice where x' is not wanted.
    """
    added = parts.sum(0).to(residual.dtype)
    summed = residual + (added if after is None else norm_reference(added, after, epsilons[0]))
    return summed, summed if ahead is None else norm_reference(summed, ahead, epsilons[1])


def row_residual(
    parts: Tensor, after: Tensor | None, residual: Tensor, ahead: Tensor | None, epsilons: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """`row_residual_reference` in one launch.

    Arguments and result are the reference's; parts are added in their order.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    summed, normed = _row_residual(parts, after, residual, ahead, *epsilons)
    return summed, summed if ahead is None else normed


def _residual_shapes(
    parts: Tensor,
    after: Tensor | None,
    residual: Tensor,
    ahead: Tensor | None,
    epsilon_behind: float,
    epsilon_ahead: float,
) -> tuple[Tensor, Tensor]:
    rows, width = residual.shape
    sizes = (rows, width), (0 if ahead is None else rows, width)
    summed, normed = (torch.empty(size, dtype=residual.dtype, device=residual.device) for size in sizes)
    return summed, normed


@row_op(_residual_shapes)
def _row_residual(
    parts: Tensor,
    after: Tensor | None,
    residual: Tensor,
    ahead: Tensor | None,
    epsilon_behind: float,
    epsilon_ahead: float,
) -> tuple[Tensor, Tensor]:
    rows, width = residual.shape
    norms = [norm for norm in (after, ahead) if norm is not None]
    for norm in norms:
        check_norm(residual, norm)
    if parts.ndim != 3 or parts.shape[1:] != residual.shape or width > WIDEST:
        raise ValueError(f"no parts {tuple(parts.shape)} of rows {tuple(residual.shape)}, up to {WIDEST} numbers")
    if parts.dtype != torch.float32 or {norm.dtype for norm in norms} - {residual.dtype}:
        dtypes = [part.dtype for part in (parts, residual, *norms)]
        raise ValueError(f"the kernel takes parts in float32, and one dtype for all else, not {dtypes}")
    if not parts.is_contiguous() or residual.stride(1) != 1:
        raise ValueError("the numbers of a row must lie side by side")
    summed, normed = _residual_shapes(parts, after, residual, ahead, epsilon_behind, epsilon_ahead)
    if rows:
        block = triton.next_power_of_2(width)
        start(
            _row_residual_kernel,
            (rows,),
            residual,
            parts,
            residual if after is None else after,
            residual,
            residual if ahead is None else ahead,
            summed,
            normed,
            rows,
            width,
            residual.stride(0),
            epsilon_behind,
            epsilon_ahead,
            PARTS=len(parts),
            BEHIND=after is not None,
            AHEAD=ahead is not None,
            BLOCK=block,
            num_warps=norm_warps(block),
        )
    return summed, normed


def norm_warps(block: int) -> int:
    """Warps of a program: at most 8 numbers for each thread, as far as there are threads."""
    return min(16, max(1, block // 256))


if wants_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def _normed(x, gain, width, epsilon, dtype: tl.constexpr):
        """A row of a dtype, 0 past its width, over its root mean square and times a weight."""
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / width + epsilon)
        return ((wide * scale).to(dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype)

    @triton.jit
    def _row_residual_kernel(
        parts_ptr,
        behind_ptr,
        residual_ptr,
        ahead_ptr,
        summed_ptr,
        normed_ptr,
        rows,
        width,
        residual_row_stride,
        epsilon_behind,
        epsilon_ahead,
        PARTS: tl.constexpr,
        BEHIND: tl.constexpr,
        AHEAD: tl.constexpr,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, BLOCK)
        there = index < width
        dtype = summed_ptr.dtype.element_ty
        after = tl.load(behind_ptr + index, mask=there, other=0.0) if BEHIND else index
        ahead = tl.load(ahead_ptr + index, mask=there, other=0.0) if AHEAD else index
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        residual = tl.load(residual_ptr + row * residual_row_stride + index, mask=there, other=0.0)
        total = tl.load(parts_ptr + row * width + index, mask=there, other=0.0)
        at = row
        for _ in tl.static_range(1, PARTS):
            at += rows
            total += tl.load(parts_ptr + at * width + index, mask=there, other=0.0)
        y = total.to(dtype)
        if BEHIND:
            y = _normed(y, after, width, epsilon_behind, dtype)
        summed = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(summed_ptr + row * width + index, summed, mask=there)
        if AHEAD:
            tl.store(normed_ptr + row * width + index, _normed(summed, ahead, width, epsilon_ahead, dtype), mask=there)

    @triton.jit
    def _row_norm_kernel(
        hidden_ptr,
        norm_ptr,
        residual_ptr,
        output_ptr,
        width,
        hidden_row_stride,
        residual_row_stride,
        epsilon,
        RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, BLOCK)
        there = index < width
        dtype = output_ptr.dtype.element_ty
        gain = tl.load(norm_ptr + index, mask=there, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        y = _normed(
            tl.load(hidden_ptr + row * hidden_row_stride + index, mask=there, other=0.0), gain, width, epsilon, dtype
        )
        if RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_row_stride + index, mask=there, other=0.0)
            y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(output_ptr + row * width + index, y, mask=there)
