"""What the end of a loop is told, remembers and tells: the messages of `loop_boundary.py`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 4
MODES = ("none", "qexit", "converge", "accel", "accel-steps")
FATES = (None, "contract", "spiral", "diverge")
GOES_ON, MET, LAST_LOOP, DIVERGED = range(4)
CHANGE, BEND, GAIN, TURNING, RADIUS, ANGLE, RESIDUAL, HAZARD = range(8)
SURVIVAL, CUMULATIVE = range(2)
LOOPS, STREAK, DIVERGING, REMEMBERED = range(4)


@dataclass(frozen=True)
class BoundaryRule:
    """What decides at the end of a loop.

    Attributes:
        mode: One of `MODES`; "none" leaves the decision to somebody else.
        threshold: q of `qexit`, eps of the others.
        last_loop: T, or k where all tokens stop at loop k.
        patience: Loops running on which `accel` must hold; also how many fates make a token's.
        min_loops: No token stops before this loop.
        norm_eps: Of the RMSNorm.
        normalize: Whether x is normed at all; without, h_t = x (for linear maps).
        growth: m of the fate.
        spiral: theta of the fate, radians.
        break_after: Loops running with the fate `diverge` that stop a token; 0 never.
    """

    mode: str
    threshold: float
    last_loop: int
    patience: int = 2
    min_loops: int = 1
    norm_eps: float = 1e-6
    normalize: bool = True
    growth: float = 0.1
    spiral: float = math.pi / 3
    break_after: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"no such mode: {self.mode!r}; there are {', '.join(MODES)}")
        if not 1 <= self.patience <= 15:
            raise ValueError(f"patience must lie in 1 to 15, the fates that are remembered, got {self.patience}")


@dataclass(frozen=True)
class BoundaryState:
    """What is remembered of tokens between loops, written in place; a token keeps its slot while it loops.

    Attributes:
        differences: The last D_t in a ring, D_t at t mod K, in the model's dtype `[slots, K, D]`.
        gram: G, newest first, float32 `[slots, K, K]`.
        gate: S_t and CDF_t, float32 `[slots, 2]`.
        counts: Loops finished, `accel` streak, loops running that diverge, fates two bits each with the newest lowest;
            int32 `[slots, 4]`. A slot whose first count is 0 is fresh, whatever else it holds.
    """

    differences: Tensor
    gram: Tensor
    gate: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, slots: int, width: int, dtype: torch.dtype, device: torch.device | str) -> "BoundaryState":
        """Fresh slots."""
        return cls(
            torch.zeros((slots, KEPT, width), dtype=dtype, device=device),
            torch.zeros((slots, KEPT, KEPT), dtype=torch.float32, device=device),
            torch.zeros((slots, 2), dtype=torch.float32, device=device),
            torch.zeros((slots, 4), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Boundary:
    """What is told of the rows.

    Attributes:
        hidden: h_t `[R, D]`.
        statistics: change, bend, gain, turning, radius, angle, residual, hazard; float32 `[R, 8]`.
        fates: Index into `FATES` of this loop, int32 `[R]`.
        decisions: `GOES_ON`, `MET`, `LAST_LOOP` or `DIVERGED`, int32 `[R]`.
    """

    hidden: Tensor
    statistics: Tensor
    fates: Tensor
    decisions: Tensor
