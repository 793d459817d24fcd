"""The product of few rows with a weight on a CPU, `y = x W^T`, in C++: it reads the weight where and as it is stored.

Bytes: N D b of the weight once, whatever the rows. torch's own product takes 1.5 to 2.7 times as long for 1 to 8 rows
in bf16 on one thread of an EPYC, since its library lays weights out anew for every call, or reads them slowly.
Sums are in float32, and each row's are added in one order, so they do not depend on what rows come along.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sigma0.kernels.native import function
from sigma0.kernels.operators import row_op
from sigma0.kernels.row_attention import ELEMENTS

# More rows are the library's, which arithmetic binds.
MOST_ROWS = {torch.bfloat16: 16, torch.float32: 128}
# Numbers of a weight from which on it pays in a compiled program, where a call costs more, by dtype.
LEAST = {torch.bfloat16: 1 << 18, torch.float32: 0}


def row_dot(hidden: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of rows; by the operator `sigma0::row_dot`.

    Args:
        hidden: x `[R, D]`, on a CPU; of whole texts, or where gradients are recorded, torch's own product is taken.
        weight: W `[N, D]`, of the same dtype.

    Returns:
        y, `[R, N]`.
    """
    records = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    known = hidden.dim() == 2 and weight.dtype in LEAST
    if known and torch.compiler.is_compiling():
        known = weight.numel() >= LEAST[weight.dtype]
    # the compiled function reads memory in order
    if not known or records or not weight.is_contiguous():
        return F.linear(hidden, weight)
    return _row_dot(hidden, weight, MOST_ROWS[weight.dtype])


def _output_shape(hidden: Tensor, weight: Tensor, most: int) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0])


@row_op(_output_shape)
def _row_dot(hidden: Tensor, weight: Tensor, most: int) -> Tensor:
    (rows, width), (columns, inner) = hidden.shape, weight.shape
    fits = hidden.dtype is weight.dtype and width == inner and weight.is_contiguous()
    if rows > most or hidden.dtype not in MOST_ROWS or not fits:
        return F.linear(hidden, weight)
    hidden = hidden.contiguous()
    output = hidden.new_empty(rows, columns)
    memory = hidden.data_ptr(), weight.data_ptr(), output.data_ptr()
    _product()(ELEMENTS[hidden.dtype], *memory, rows, width, columns, torch.get_num_threads())
    return output


@lru_cache
def _product() -> Callable[..., None]:
    return function("row_dot", "npppnnnn")
