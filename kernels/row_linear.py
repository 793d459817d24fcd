# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""The product of the rows of a pass with a weight: `y = x W^T`, of the same bits whatever rows come along.

`row_parts` leaves it in parts, one for each split of a row, float32 `[S, R, N]` with y = sum_s y_s: for outputs that
are too few to fill a device by themselves. The norm after them adds them up (`row_residual.py`).

Bytes: N D b of the weight once for sixteen rows, (D + N) b for each row; of parts 4 S N for each row.
"""

from typing import Any

import torch
from torch import Tensor

from sigma0.kernels.operators import row_op
from sigma0.kernels.row_product import ROW_TILE, check_product, start, tiling_of
from sigma0.presence import wants_triton


def _output_shape(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]))


@row_op(_output_shape)
def row_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` in one launch.

    Args:
        hidden: x `[R, D]`.
        weight: W `[N, D]`.

    Returns:
        y, `[R, N]`.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    check_product(hidden, weight)
    output = torch.empty((len(hidden), len(weight)), dtype=hidden.dtype, device=hidden.device)
    _launch(hidden, weight, output, tiling_of(hidden, weight))
    return output


def row_parts_reference(hidden: Tensor, weight: Tensor) -> Tensor:
    """As `row_parts`, all in one part."""
    return torch.nn.functional.linear(hidden.float(), weight.float())[None]


def _parts_shape(hidden: Tensor, weight: Tensor) -> Tensor:
    splits = tiling_of(hidden, weight, splits=True).splits
    return hidden.new_empty((splits, hidden.shape[0], weight.shape[0]), dtype=torch.float32)


@row_op(_parts_shape)
def row_parts(hidden: Tensor, weight: Tensor) -> Tensor:
    """As `row_linear`, in parts that are to be added in their order.

    Returns:
        Float32 `[S, R, N]`.
    """
    check_product(hidden, weight)
    tiling = tiling_of(hidden, weight, splits=True)
    parts = torch.empty((tiling.splits, len(hidden), len(weight)), dtype=torch.float32, device=hidden.device)
    _launch(hidden, weight, parts, tiling)
    return parts


def _launch(hidden: Tensor, weight: Tensor, output: Tensor, tiling: Any) -> None:
    rows, width = hidden.shape
    if not rows:
        return
    start(
        _row_linear_kernel,
        (triton.cdiv(rows, ROW_TILE), triton.cdiv(len(weight), tiling.outputs), tiling.splits),
        hidden,
        hidden,
        weight,
        output,
        rows,
        width,
        len(weight),
        hidden.stride(0),
        OUTPUTS=tiling.outputs,
        STEP=tiling.step,
        SPLITS=tiling.splits,
        UPCAST=upcasts(_row_linear_kernel, hidden.dtype),
        **tiling.options,
    )


if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.row_product import product, rows_of_tile, upcasts

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
        SPLITS: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row, there = rows_of_tile(tl.program_id(0), rows)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        split = tl.program_id(2)
        begin = 0
        end = inner
        if SPLITS > 1:
            # whole steps, so that every split starts where a row's loads are wide
            item = tl.cdiv(tl.cdiv(inner, STEP), SPLITS) * STEP
            begin = split * item
            end = tl.minimum(begin + item, inner)
        total = product(
            hidden_ptr, row * hidden_row_stride, there, weight_ptr, output, output < width, inner, begin, end,
            STEP, UPCAST, PDL,
        )  # fmt: skip
        wanted = there[:, None] & (output < width)[None, :]
        at = (split.to(tl.int64) * rows + row)[:, None] * width + output[None, :]
        tl.store(output_ptr + at, total, mask=wanted)
