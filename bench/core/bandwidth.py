"""How long a call takes, and how fast a plain copy is: what other times are measured against."""

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

_COPY_BYTES = 2**28


def time_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call; on CUDA with the cache flushed before each and the device's own clock."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e3
    # a timer has one thread of its own unless it is told
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.3).median)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes that a plain copy reads and writes in a second; on a CPU with the threads of this process."""
    # written, since memory that was never written is one page of zeros on a CPU, which its cache holds
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / time_of(lambda: target.copy_(source), device)
