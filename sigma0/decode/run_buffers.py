"""What a run over a cache leaves to the next: tensors that stay where they are, and the graphs over them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from sigma0.decode.graphs import Capture, Captured
from sigma0.decode.sampling_params import SamplingSettings
from sigma0.decode.settings import SequenceSettings


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
    """Captured steps; not copied with a cache, whose tensors a copy does not share.

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

    def keep_over(self, planes: Tensor) -> None:
        """Drops the steps over other planes, whose memory they would keep."""
        if planes is not self._planes:
            self.steps.clear()
        self._planes = planes


class RunBuffers:
    """Settings of the sequences of a cache, and graphs of the steps over them.

    Args:
        sequences: S.
        depth: T.
        device: Where the lanes are.

    Attributes:
        settings: When sequences stop and end.
        sampling: How their ids are sampled.
        graphs: Steps; None before the first.
    """

    def __init__(self, sequences: int, depth: int, device: torch.device) -> None:
        self.settings = SequenceSettings(sequences, depth, device)
        self.sampling = SamplingSettings(sequences, device)
        self.graphs: StepGraphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a cache makes its own."""
        return None
