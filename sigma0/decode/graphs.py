"""CUDA graphs: a function of tensors that stay in place, launched as one.

It is called first on a stream of its own, so that kernels are compiled and libraries take their workspaces; then once
more to be captured, which computes nothing and records every launch. A replay is all launches by one call of the host,
over the same tensors.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sigma0.errors import first_line

Function = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Captured:
    """A captured function.

    Attributes:
        replay: Runs it.
        outputs: What it returns, in tensors that the next replay writes again.
    """

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]


class Capture(Protocol):
    """Captures functions, which must change nothing that matters when they are called for it."""

    def __call__(self, function: Function) -> Captured:
        """The function as one launch.

        Raises:
            RuntimeError: Naming the operation that a graph cannot hold.
        """


@dataclass(frozen=True)
class StepGraph:
    """A captured step.

    Attributes:
        captured: The step.
        parts: Tensors that it works on and that a run may replace.
        constants: The model's, which it keeps.
    """

    captured: Captured
    parts: tuple[object, ...]
    constants: Sequence[Tensor]

    def is_over(self, parts: tuple[object, ...]) -> bool:
        """Whether it works on these."""
        return len(parts) == len(self.parts) and all(map(is_, parts, self.parts))


class StepGraphs:
    """Captured steps.

    Args:
        capture: Captures them.

    Attributes:
        capture: As given.
        steps: By what they were captured for.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.steps: dict[Hashable, StepGraph] = {}
        self._planes: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a cache, whose tensors it does not share, makes its own."""
        return None

    def keep_over(self, planes: Tensor) -> None:
        """Drops the steps over other planes, whose memory they would keep."""
        if planes is not self._planes:
            self.steps.clear()
        self._planes = planes


class CudaCapture:
    """Captures CUDA graphs, whose memory is one pool.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Function) -> Captured:
        """See `Capture`."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            function()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        called = LastOperation()
        try:
            # only this thread's calls belong to the graph, and only they can break it
            with (
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                called,
            ):
                outputs = function()
        except RuntimeError as error:
            raise RuntimeError(f"a CUDA graph cannot hold {called.name}: {first_line(error)}") from error
        return Captured(graph.replay, outputs)


class LastOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which operation was called last.

    Attributes:
        name: Of it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "its first operation"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls it."""
        self.name = str(func)
        return func(*args, **(kwargs or {}))
