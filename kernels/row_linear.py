"""The product of the rows of a pass with a weight: `y = x W^T`, of the same bits whatever rows come along.

Bytes: N D b of the weight once for sixteen rows, (D + N) b for each row.
"""

import torch
from torch import Tensor

from sigma0.kernels.row_product import LIBRARY, PRODUCT_WARPS, ROW_TILE, check_product, stages_for, step_for
from sigma0.presence import wants_triton

# Outputs of a program: 128 programs of whole rows at 2,048 numbers, so that D need not be split.
OUTPUTS = 16


def row_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` in one launch; in a compiled graph the operator `sigma0::row_linear`.

    Args:
        hidden: x `[R, D]`.
        weight: W `[N, D]`.

    Returns:
        y, `[R, N]`.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    run = torch.ops.sigma0.row_linear if torch.compiler.is_compiling() else launch
    output: Tensor = run(hidden, weight)
    return output


def launch(hidden: Tensor, weight: Tensor) -> Tensor:
    """As `row_linear`, by the kernel itself."""
    check_product(hidden, weight)
    rows, width = hidden.shape
    output = torch.empty((rows, len(weight)), dtype=hidden.dtype, device=hidden.device)
    if rows:
        _row_linear_kernel[(triton.cdiv(rows, ROW_TILE), triton.cdiv(len(weight), OUTPUTS))](
            hidden,
            weight,
            output,
            rows,
            width,
            len(weight),
            hidden.stride(0),
            OUTPUTS=OUTPUTS,
            STEP=step_for(hidden.dtype),
            UPCAST=upcasts(_row_linear_kernel, hidden.dtype),
            num_warps=PRODUCT_WARPS,
            num_stages=stages_for(hidden.dtype),
        )
    return output


def _output_shape(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]))


LIBRARY.define("row_linear(Tensor hidden, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("row_linear", launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::row_linear", _output_shape, lib=LIBRARY)

if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.row_product import product, rows_of_tile, upcasts

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)

    @triton.jit(do_not_specialize=["rows"])
    def _row_linear_kernel(
        hidden_ptr,
        weight_ptr,
        output_ptr,
        rows,
        inner,
        width,
        hidden_row_stride,
        OUTPUTS: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
    ):
        row, there = rows_of_tile(tl.program_id(0), rows)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        scale = tl.zeros([_ROW_TILE], tl.float32)
        total = product(
            hidden_ptr, row * hidden_row_stride, there, scale, hidden_ptr, weight_ptr, output, output < width, inner,
            False, STEP, UPCAST,
        )  # fmt: skip
        wanted = there[:, None] & (output < width)[None, :]
        tl.store(output_ptr + row[:, None] * width + output[None, :], total, mask=wanted)
