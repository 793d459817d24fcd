"""What a step works on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sigma0.decode.attention import PassRows, Placement
from sigma0.decode.lanes import Lanes
from sigma0.decode.model import LoopedModel
from sigma0.decode.ops import Operations
from sigma0.decode.planes import LayerPlanes
from sigma0.decode.settings import Program, SequenceSettings


@dataclass(frozen=True)
class Batch:
    """What a step works on.

    Attributes:
        model: The looped model.
        lanes: Tokens in flight.
        settings: Of every sequence.
        program: What a pass has to compute.
        layers: Planes of every layer.
        placement: Where cache positions lie.
        longest: Bound on the cache positions of a pass, plus one.
        ops: Operations of a pass.
        loop: What runs the block in place of the model's own `loop`; None for that.
    """

    model: LoopedModel
    lanes: Lanes
    settings: SequenceSettings
    program: Program
    layers: Sequence[LayerPlanes]
    placement: Placement
    longest: int
    ops: Operations
    loop: Callable[[Tensor, PassRows], Tensor] | None = None
