# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Gates and ups of the rows of a pass, which are normed: products and the gated numbers in one kernel.

With W = [W_gate; W_up] packed:

    g, u = x W^T,   y = silu(g) u,   silu(z) = z / (1 + exp(-z))

A program computes gates and ups of the same numbers, so that neither is written. Bytes: 2 F D b of weights once,
(D + F) b for each row.
"""

import torch
from torch import Tensor

from sigma0.kernels.operators import row_op
from sigma0.kernels.row_product import ROW_TILE, check_product, start, tiling_of
from sigma0.presence import wants_triton


def row_gated_reference(hidden: Tensor, gate_up_weight: Tensor) -> Tensor:
    """The formulas above in plain torch.

    Args:
        hidden: x `[R, D]`.
        gate_up_weight: W `[2 F, D]`.

    Returns:
        y, `[R, F]`.
    """
    gates, ups = torch.nn.functional.linear(hidden, gate_up_weight).chunk(2, dim=-1)  # [R, F] each
    return torch.nn.functional.silu(gates) * ups


def _output_shape(hidden: Tensor, gate_up_weight: Tensor) -> Tensor:
    return hidden.new_empty((hidden.shape[0], gate_up_weight.shape[0] // 2))


@row_op(_output_shape)
def row_gated(hidden: Tensor, gate_up_weight: Tensor) -> Tensor:
    """`row_gated_reference` in one launch of a Triton kernel.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    check_product(hidden, gate_up_weight)
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gates and ups are as many, got {gate_up_weight.shape[0]} outputs")
    rows, width = hidden.shape
    inner = gate_up_weight.shape[0] // 2
    gated = torch.empty((rows, inner), dtype=hidden.dtype, device=hidden.device)
    if rows:
        tiling = tiling_of(hidden, gate_up_weight)
        pairs = tiling.outputs // 2
        start(
            _row_gated_kernel,
            (triton.cdiv(rows, ROW_TILE), triton.cdiv(inner, pairs)),
            hidden,
            hidden,
            gate_up_weight,
            gated,
            rows,
            width,
            inner,
            hidden.stride(0),
            PAIRS=pairs,
            STEP=tiling.step,
            UPCAST=upcasts(_row_gated_kernel, hidden.dtype),
            **tiling.options,
        )
    return gated


if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.row_product import product, rows_of_tile, upcasts

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)

    @triton.jit(do_not_specialize=["rows"])
    def _row_gated_kernel(
        hidden_ptr,
        weight_ptr,
        gated_ptr,
        rows,
        width,
        inner,
        hidden_row_stride,
        PAIRS: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row, there = rows_of_tile(tl.program_id(0), rows)
        # a gate and its up follow each other
        pair = tl.arange(0, 2 * PAIRS)
        in_half = tl.program_id(1) * PAIRS + pair // 2
        outputs = (pair % 2) * inner + in_half
        total = product(
            hidden_ptr, row * hidden_row_stride, there, weight_ptr, outputs, in_half < inner, width, 0, width,
            STEP, UPCAST, PDL,
        )  # fmt: skip
        # rounded where operations of their own would round
        dtype = gated_ptr.dtype.element_ty
        gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), [_ROW_TILE, PAIRS, 2]))
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        number = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
        wanted = there[:, None] & (number < inner)[None, :]
        tl.store(gated_ptr + row[:, None] * inner + number[None, :], silu * up, mask=wanted)
