"""Products of the few rows of a decode pass with a weight, by tiles of 16 rows: what the `row_*` kernels share.

A pass over R rows reads every weight once and is bound by that, so a program holds some outputs' whole rows of the
weight, with 16 rows of the pass beside them. Programs of the same outputs follow each other: where R > 16 all but the
first find the weight in the L2 cache.

A row's bits depend on the row and the weight alone, not on R nor on its place: R is padded to a multiple of 16, no tile
is larger, and one program adds up all of an output's products, in float32 and in the order of its steps.
"""

import torch
from torch import Tensor

from sigma0.presence import wants_triton

# Rows of a tile, and outputs of a program that takes them in pairs: two rows of the weight for each.
ROW_TILE, PAIRS = 16, 16
PRODUCT_WARPS = 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]


def step_for(dtype: torch.dtype) -> int:
    """Numbers of a row in one step: 256 bytes."""
    return 256 // dtype.itemsize


def stages_for(dtype: torch.dtype) -> int:
    """Steps in flight: what hides the memory's latency where the tensor cores multiply."""
    return 4 if dtype.itemsize == 2 else 2


def norm_reference(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm `[R, D]`, rounded to the model's dtype before and after the weight as transformers' modules do."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(hidden.dtype)


def check_product(hidden: Tensor, weight: Tensor, *others: Tensor) -> None:
    """Refuses rows `[R, D]`, a weight `[N, D]` and other tensors of one dtype that the kernels do not support.

    Raises:
        ValueError: For shapes, dtypes or strides.
    """
    if hidden.dtype not in DTYPES or {part.dtype for part in (weight, *others)} - {hidden.dtype}:
        dtypes = [part.dtype for part in (hidden, weight, *others)]
        raise ValueError(f"the kernel takes one dtype of float32, float16 and bfloat16, not {dtypes}")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"rows {tuple(hidden.shape)} and a weight {tuple(weight.shape)} have no product")
    if hidden.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the numbers of a row must lie side by side, and the rows of a weight")


def check_norm(hidden: Tensor, weight: Tensor) -> None:
    """Refuses the weight of a norm that is not `[D]`.

    Raises:
        ValueError: For its shape or strides.
    """
    if tuple(weight.shape) != hidden.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"a norm of {hidden.shape[1]} numbers, but its weight is {tuple(weight.shape)}")


if wants_triton():
    import triton
    import triton.language as tl

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)

    def upcasts(kernel: object, dtype: torch.dtype) -> bool:
        """Whether operands go to float32: Triton's interpreter multiplies bfloat16 matrices wrongly."""
        return dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction)

    @triton.jit
    def rows_of_tile(tile, rows):
        """Numbers of the rows of a tile, and which of them there are."""
        row = tile.to(tl.int64) * _ROW_TILE + tl.arange(0, _ROW_TILE)
        return row, row < rows

    @triton.jit
    def inverse_norm(hidden_ptr, row_at, there, width, epsilon, STEP: tl.constexpr):
        """1 / sqrt(mean(x^2) + epsilon) of the rows of a tile."""
        squares = tl.zeros([_ROW_TILE, STEP], tl.float32)
        for start in range(0, width, STEP):
            index = start + tl.arange(0, STEP)
            where = there[:, None] & (index < width)[None, :]
            x = tl.load(hidden_ptr + row_at[:, None] + index[None, :], mask=where, other=0.0).to(tl.float32)
            squares += x * x
        return tl.rsqrt(tl.sum(squares, axis=1) / width + epsilon)

    @triton.jit
    def product(
        hidden_ptr,
        row_at,
        there,
        scale,
        norm_ptr,
        weight_ptr,
        outputs,
        wanted,
        width,
        NORM: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
    ):
        """Rows of a tile, normed or not, times some rows of the weight: `[16, outputs]`, float32."""
        total = tl.zeros([_ROW_TILE, outputs.shape[0]], tl.float32)
        for start in range(0, width, STEP):
            index = start + tl.arange(0, STEP)
            inside = (index < width)[None, :]
            w = tl.load(
                weight_ptr + outputs.to(tl.int64)[:, None] * width + index[None, :],
                mask=wanted[:, None] & inside,
                other=0.0,
            )
            x = tl.load(hidden_ptr + row_at[:, None] + index[None, :], mask=there[:, None] & inside, other=0.0)
            if NORM:
                gain = tl.load(norm_ptr + index, mask=index < width, other=0.0).to(tl.float32)
                rounded = (x.to(tl.float32) * scale[:, None]).to(w.dtype).to(tl.float32)
                x = (rounded * gain[None, :]).to(w.dtype)
            if UPCAST:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        return total
