"""A kernel of vLLM's rejection sampler that its CPU build has wrong, replaced through vLLM's own registry.

`expand_kernel` repeats temperature, top-k and top-p of a request for each of its drafts. The CPU build of 0.32 writes
the result into a copy (https://github.com/vllm-project/vllm/issues/55005), so drafts would be judged under whatever the
memory held.
"""

from torch import Tensor

from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

NAME = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(output: Tensor, values: Tensor, ends: Tensor, old: float, new: float, most: int | None = None) -> None:
    """Fills `output`, `[N]`, with each of `values`, `[R]`, for the tokens of its request.

    Args:
        output: Of any dtype.
        values: One for each request.
        ends: Tokens up to the end of each request, `[R]`.
        old: A value to be replaced.
        new: What takes its place.
        most: Tokens of a request at most; not used.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))  # [R]
    output.copy_(values.masked_fill(values == old, new).repeat_interleave(counts.long()))


def correct_rejection_sampler() -> None:
    """Registers the kernel where vLLM runs on a CPU without Triton; elsewhere Triton's own is right."""
    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({NAME: expand})
