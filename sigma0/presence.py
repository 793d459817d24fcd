"""Whether Triton's kernels are wanted in a process: importing Triton takes as long as a small model's whole answer."""

import ctypes
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any


def has_driver(build: Mapping[str, Any]) -> bool:
    """Whether torch may find a GPU.

    Args:
        build: What `torch/version.py` defines.
    """
    if build["cuda"] is None or sys.platform != "linux":
        return build["cuda"] is not None or build["hip"] is not None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def wants_triton() -> bool:
    """Whether it is there with a GPU, an interpreter that was asked for, or somebody who compiles ahead of time."""
    if find_spec("triton") is None:
        return False
    if "sigma0.kernels.variants" in sys.modules or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return True
    import torch.version

    return has_driver(vars(torch.version))
