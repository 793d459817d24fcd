"""The product of few rows with a weight that oneDNN has laid out for it, on a CPU.

`hidden [R, D] @ weight [N, D].T`, which is bound by reading the weight's N D b bytes. One thread of an EPYC takes for 1
to 8 rows of weights from 1024 x 1024 on, from its caches, 1.5 to 2.7 times as long for `torch.nn.functional.linear` in
bf16, 1.3 to 4.2 times in float32. In bf16 the numbers are the same bit for bit; in float32 they differ in rounding.
"""

import torch
from torch import Tensor

# Numbers of a weight from which on it pays, by dtype: a call costs some 10 us, and MKL is quick on small float32 ones.
_LEAST = {torch.bfloat16: 1 << 18, torch.float32: 1 << 20}


def pays(weight: Tensor) -> bool:
    """Whether products with a weight `[N, D]` are quicker once it is reordered."""
    if weight.device.type != "cpu" or weight.numel() < _LEAST.get(weight.dtype, weight.numel() + 1):
        return False
    bf16_runs = weight.dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(torch.backends.mkldnn.is_available() and bf16_runs)  # type: ignore[no-untyped-call]


def reorder(weight: Tensor) -> Tensor:
    """A copy of a weight `[N, D]` in oneDNN's own layout, as inductor makes it for frozen models."""
    # for more than one row: a weight that is laid out for one is slow for others in float32
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 2)  # type: ignore[no-any-return]


def reordered_linear(hidden: Tensor, reordered: Tensor) -> Tensor:
    """Rows `[R, D]` times a weight that `reorder` returned: `[R, N]`."""
    if torch.compiler.is_compiling():
        return torch.ops.sigma0.reordered_linear(hidden, reordered)  # type: ignore[no-any-return]
    return _product(hidden, reordered)


def _product(hidden: Tensor, reordered: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, reordered, None, "none", [], "")  # type: ignore[no-any-return]


def _shape_of_product(hidden: Tensor, reordered: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], reordered.shape[0])


# One of our own, since inductor takes oneDNN's for weights that are constants of its graph, which would be one copy for
# each program.
_LIBRARY = torch.library.Library("sigma0", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("reordered_linear(Tensor hidden, Tensor reordered) -> Tensor")  # type: ignore[no-untyped-call]
for _key in ("CPU", "MkldnnCPU"):
    _LIBRARY.impl("reordered_linear", _product, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("sigma0::reordered_linear", _shape_of_product, lib=_LIBRARY)
