"""Bookkeeping between host and device that does not make either wait for the other without need.

`tensor.to(device)` of ordinary host memory makes the host wait for the device's queue, and so do `.tolist()`, `bool()`
and `.cpu()`. Here indices go over from pinned memory behind what is queued, and results come back through `to_host`,
the one place where a decoder waits. `torch.cuda.set_sync_debug_mode("error")` therefore holds around a whole pass.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, queued and not waited for; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor as an array, once the device has got that far."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return np.asarray(tensor.cpu())
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    landed.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))
    done.synchronize()
    return np.asarray(landed)
