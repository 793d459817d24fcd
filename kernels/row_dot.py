"""The product of few rows with a weight on a CPU, `y = x W^T`, in C++: it reads the weight where and as it is stored.

Bytes: N D b of the weight once, whatever the rows. torch's own product takes 1.5 to 2.7 times as long for 1 to 8 rows
in bf16 on one thread of an EPYC, since its library lays weights out anew for every call, or reads them slowly.
Sums are in float32, and each row's are added in one order, so they do not depend on what rows come along.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.kernels.cpp_library import ELEMENTS, load

# More rows are the library's, which arithmetic binds.
MOST_ROWS = {torch.bfloat16: 16, torch.float32: 32}
# Numbers of a weight from which on it pays, by dtype; in a compiled graph an operator is called from Python again.
LEAST = {torch.bfloat16: 1 << 18, torch.float32: 0}
LEAST_COMPILED = {torch.bfloat16: 1 << 18, torch.float32: 1 << 20}


def row_dot(hidden: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of rows; in a compiled graph the operator `sigma0::row_dot`.

    Args:
        hidden: x `[R, D]`, on a CPU; of whole texts, or where gradients are recorded, torch's own product is taken.
        weight: W `[N, D]`, of the same dtype.

    Returns:
        y, `[R, N]`.
    """
    compiling = torch.compiler.is_compiling()
    least = (LEAST_COMPILED if compiling else LEAST).get(weight.dtype, weight.numel() + 1)
    records = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if weight.numel() < least or hidden.dim() != 2 or records:
        return F.linear(hidden, weight)
    run = torch.ops.sigma0.row_dot if compiling else _row_dot
    output: Tensor = run(hidden, weight)
    return output


def _row_dot(hidden: Tensor, weight: Tensor) -> Tensor:
    rows, width = hidden.shape
    fits = hidden.dtype is weight.dtype and width == weight.shape[1]
    if rows > MOST_ROWS[weight.dtype] or not fits or not weight.is_contiguous():
        # torch refuses what does not fit; the compiled function would read past its memory
        return F.linear(hidden, weight)
    hidden = hidden.contiguous()
    output = hidden.new_empty(rows, weight.shape[0])
    _compiled(weight.dtype)(
        hidden.data_ptr(), weight.data_ptr(), output.data_ptr(), rows, width, weight.shape[0], torch.get_num_threads()
    )
    return output


@lru_cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    arguments = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
    return load(
        "row_dot.cpp", "row_dot", arguments, {"ELEMENT": ELEMENTS[dtype], "BFLOAT16": int(dtype is torch.bfloat16)}
    )


def _output_shape(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0])


_LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("row_dot(Tensor hidden, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("row_dot", _row_dot, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::row_dot", _output_shape, lib=_LIBRARY)
