"""What is decided by rows of logits on a CPU: whether `margin` holds, and the argmax.

    leads    p1 - p2 >= theta, with p1 and p2 the largest of softmax(logits)
    best     the first id of the largest logit

The reference of the first is `collapse.leads_reference`; for few rows torch's calls cost more than the work.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels.collapse import leads_reference
from sigma0.kernels.native import function


def margin_rows(logits: Tensor, theta: float | Tensor) -> Tensor:
    """As `collapse.leads_reference`, which other dtypes and compiled graphs take."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1 or torch.compiler.is_compiling():
        return leads_reference(logits, theta)
    if not isinstance(theta, Tensor):
        theta = logits.new_tensor([theta])
    leads = torch.empty(logits.shape[0], dtype=torch.bool)
    _leads()(
        logits.data_ptr(),
        theta.data_ptr(),
        leads.data_ptr(),
        *logits.shape,
        logits.stride(0),
        theta.stride(0) if theta.shape[0] > 1 else 0,
    )
    return leads


def argmax_rows(logits: Tensor, broken: int) -> Tensor:
    """The argmax of each row, int64 `[R]`.

    Args:
        logits: float32 `[R, V]`.
        broken: What stands in its place where the largest logit is not finite.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    best = torch.empty(logits.shape[0], dtype=torch.int64)
    _best()(logits.data_ptr(), best.data_ptr(), *logits.shape, logits.stride(0), broken)
    return best


@lru_cache
def _leads() -> Callable[..., None]:
    return function("margin_rows", "pppnnnn")


@lru_cache
def _best() -> Callable[..., None]:
    return function("argmax_rows", "ppnnnn")
