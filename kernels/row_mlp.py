"""The gated MLP of the rows of a pass: one kernel up to the gated numbers, and `row_linear` down.

With n the RMSNorm (or none) and W = [W_gate; W_up] packed:

    g, u = n(x) W^T,   y = (silu(g) u) W_down^T,   silu(z) = z / (1 + exp(-z))

A program of the first kernel computes gates and ups of the same numbers, so that neither is written. Bytes: 2 F D b and
F D b of weights once, 2 (D + F) b for each row.
"""

import torch
from torch import Tensor

from sigma0.kernels.row_linear import launch as linear_rows
from sigma0.kernels.row_product import (
    LIBRARY,
    PAIRS,
    PRODUCT_WARPS,
    ROW_TILE,
    check_norm,
    check_product,
    norm_reference,
    stages_for,
    step_for,
)
from sigma0.presence import wants_triton


def row_mlp_reference(
    hidden: Tensor, gate_up_weight: Tensor, down_weight: Tensor, norm_weight: Tensor | None, epsilon: float
) -> Tensor:
    """The formulas above in plain torch.

    Args:
        hidden: x `[R, D]`.
        gate_up_weight: W `[2 F, D]`.
        down_weight: W_down `[D, F]`.
        norm_weight: Weight of the norm, `[D]`; None where x is normed already.
        epsilon: Added to its mean square.

    Returns:
        y, `[R, D]`.
    """
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    normed = hidden if norm_weight is None else norm_reference(hidden, norm_weight, epsilon)
    gates, ups = linear(normed, gate_up_weight).chunk(2, dim=-1)  # [R, F] each
    return linear(silu(gates) * ups, down_weight)


def row_mlp(
    hidden: Tensor, gate_up_weight: Tensor, down_weight: Tensor, norm_weight: Tensor | None, epsilon: float
) -> Tensor:
    """`row_mlp_reference` in two launches of Triton kernels; in a compiled graph the operator `sigma0::row_mlp`.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernels do not support.
    """
    run = torch.ops.sigma0.row_mlp if torch.compiler.is_compiling() else _launch
    output: Tensor = run(hidden, gate_up_weight, down_weight, norm_weight, epsilon)
    return output


def _launch(
    hidden: Tensor, gate_up_weight: Tensor, down_weight: Tensor, norm_weight: Tensor | None, epsilon: float
) -> Tensor:
    check_product(hidden, gate_up_weight, down_weight, *([] if norm_weight is None else [norm_weight]))
    if norm_weight is not None:
        check_norm(hidden, norm_weight)
    rows, width = hidden.shape
    inner = gate_up_weight.shape[0] // 2
    if gate_up_weight.shape[0] % 2 or down_weight.ndim != 2 or down_weight.shape[1] != inner:
        shapes = tuple(gate_up_weight.shape), tuple(down_weight.shape)
        raise ValueError(f"gates and ups {shapes[0]} do not fit the weight {shapes[1]} of the way down")
    gated = torch.empty((rows, inner), dtype=hidden.dtype, device=hidden.device)
    check_product(gated, down_weight)
    if not rows:
        return linear_rows(gated, down_weight)
    _row_gated_kernel[(triton.cdiv(rows, ROW_TILE), triton.cdiv(inner, PAIRS))](
        hidden,
        hidden if norm_weight is None else norm_weight,
        gate_up_weight,
        gated,
        rows,
        width,
        inner,
        hidden.stride(0),
        epsilon,
        NORM=norm_weight is not None,
        PAIRS=PAIRS,
        STEP=step_for(hidden.dtype),
        UPCAST=upcasts(_row_gated_kernel, hidden.dtype),
        num_warps=PRODUCT_WARPS,
        num_stages=stages_for(hidden.dtype),
    )
    return linear_rows(gated, down_weight)


def _output_shape(
    hidden: Tensor, gate_up_weight: Tensor, down_weight: Tensor, norm_weight: Tensor | None, epsilon: float
) -> Tensor:
    return hidden.new_empty((hidden.shape[0], down_weight.shape[0]))


LIBRARY.define(  # type: ignore[no-untyped-call]
    "row_mlp(Tensor hidden, Tensor gate_up_weight, Tensor down_weight, Tensor? norm_weight, float epsilon) -> Tensor"
)
LIBRARY.impl("row_mlp", _launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::row_mlp", _output_shape, lib=LIBRARY)

if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.row_product import inverse_norm, product, rows_of_tile, upcasts

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)

    @triton.jit(do_not_specialize=["rows"])
    def _row_gated_kernel(
        hidden_ptr,
        norm_ptr,
        weight_ptr,
        gated_ptr,
        rows,
        width,
        inner,
        hidden_row_stride,
        epsilon,
        NORM: tl.constexpr,
        PAIRS: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
    ):
        row, there = rows_of_tile(tl.program_id(0), rows)
        # a gate and its up follow each other
        pair = tl.arange(0, 2 * PAIRS)
        in_half = tl.program_id(1) * PAIRS + pair // 2
        outputs = (pair % 2) * inner + in_half
        row_at = row * hidden_row_stride
        scale = tl.zeros([_ROW_TILE], tl.float32)
        if NORM:
            scale = inverse_norm(hidden_ptr, row_at, there, width, epsilon, STEP)
        total = product(
            hidden_ptr, row_at, there, scale, norm_ptr, weight_ptr, outputs, in_half < inner, width, NORM, STEP, UPCAST
        )
        # rounded where operations of their own would round
        dtype = gated_ptr.dtype.element_ty
        gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), [_ROW_TILE, PAIRS, 2]))
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        number = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
        wanted = there[:, None] & (number < inner)[None, :]
        tl.store(gated_ptr + row[:, None] * inner + number[None, :], silu * up, mask=wanted)
