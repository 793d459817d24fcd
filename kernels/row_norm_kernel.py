"""RMS norm of the rows of a pass, with what it is added to, in Triton: the formula of `row_norm.py` in any dtype.

    y = r + w round(x / sqrt(mean(x^2) + epsilon))

rounded to the model's dtype where transformers' modules round: after the scale, the weight and the sum. One program has
one row, and adds its squares up in one order. Bytes: 3 D b for each row, and D b.
"""

import torch
from torch import Tensor

from sigma0.kernels.row_product import LIBRARY, check_norm, norm_reference
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


def row_norm(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """`row_norm_reference` in one launch; in a compiled graph the operator `sigma0::row_norm`.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    run = torch.ops.sigma0.row_norm if torch.compiler.is_compiling() else _launch
    output: Tensor = run(hidden, weight, epsilon, residual)
    return output


def _launch(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
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
        _row_norm_kernel[(rows,)](
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


def norm_warps(block: int) -> int:
    """Warps of a program: at most 8 numbers for each thread, as far as there are threads."""
    return min(16, max(1, block // 256))


def _output_shape(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
    return hidden.new_empty(hidden.shape)


LIBRARY.define(  # type: ignore[no-untyped-call]
    "row_norm(Tensor hidden, Tensor weight, float epsilon, Tensor? residual) -> Tensor"
)
LIBRARY.impl("row_norm", _launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::row_norm", _output_shape, lib=LIBRARY)

if wants_triton():
    import triton
    import triton.language as tl

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
    ):
        row = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, BLOCK)
        there = index < width
        dtype = output_ptr.dtype.element_ty
        x = tl.load(hidden_ptr + row * hidden_row_stride + index, mask=there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / width + epsilon)
        gain = tl.load(norm_ptr + index, mask=there, other=0.0).to(tl.float32)
        y = ((x * scale).to(dtype).to(tl.float32) * gain).to(dtype)
        if RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_row_stride + index, mask=there, other=0.0)
            y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(output_ptr + row * width + index, y, mask=there)
