"""What the end of a loop is told, remembers and tells: the messages of `loop_boundary.py`."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KEPT = 4
GRAM = KEPT * (KEPT + 1) // 2
MODES = ("none", "qexit", "converge", "accel", "accel-steps")
Fate = Literal["contract", "spiral", "diverge"]
FATES: tuple[Fate | None, ...] = (None, "contract", "spiral", "diverge")
GOES_ON, MET, LAST_LOOP, DIVERGED = range(4)
CHANGE, BEND, GAIN, TURNING, RADIUS, ANGLE, RESIDUAL, HAZARD = range(8)
STATISTICS = ("change", "bend", "gain", "turning", "radius", "angle", "residual", "hazard")
SURVIVAL, CUMULATIVE = range(2)
LOOPS, STREAK, DIVERGING, REMEMBERED = range(4)


@dataclass(frozen=True)
class BoundaryWeights:
    """What of a model works at the end of a loop.

    Attributes:
        norm: Of the RMSNorm `[D]`.
        norm_eps: Of the RMSNorm.
        gate: Of the exit gate `[D]`.
        gate_bias: `[1]`.
    """

    norm: Tensor
    norm_eps: float
    gate: Tensor
    gate_bias: Tensor


@dataclass(frozen=True)
class BoundaryRule:
    """What decides at the end of a loop.

    Attributes:
        mode: One of `MODES`; "none" leaves the decision to somebody else.
        threshold: q of `qexit`, eps of the others.
        last_loop: T, or k where all tokens stop at loop k.
        patience: Loops running on which `accel` must hold.
        min_loops: No token stops before this loop.
        watch: Whether differences are kept and told of; without, `qexit` and "none" take less.
        growth: m of the fate.
        spiral: theta of the fate, radians.
        break_after: Loops running with the fate `diverge` that stop a token; 0 never.
    """

    mode: str
    threshold: float
    last_loop: int
    patience: int = 2
    min_loops: int = 1
    watch: bool = True
    growth: float = 0.1
    spiral: float = math.pi / 3
    break_after: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"no such mode: {self.mode!r}; there are {', '.join(MODES)}")
        if self.patience < 1 or self.min_loops < 1 or self.last_loop < 1:
            raise ValueError(
                f"patience, min_loops and last_loop must be at least 1, got {self.patience}, {self.min_loops} and "
                f"{self.last_loop}"
            )

    @property
    def watches(self) -> bool:
        """Whether differences are kept: they are asked for, or decide."""
        return self.watch or self.break_after > 0 or self.mode not in ("none", "qexit")

    @property
    def decides_by(self) -> str:
        """The mode that can be met: `qexit` at q = 1 means every loop, though float32 may round a sum to 1."""
        return "none" if self.mode == "qexit" and self.threshold >= 1 else self.mode


@dataclass(frozen=True)
class BoundaryState:
    """What is remembered of tokens between loops, written in place; a token keeps its slot while it loops.

    Attributes:
        differences: The last D_t in a ring, D_t at t mod K, in the model's dtype `[slots, K, D]`.
        gram: G_00 G_01 G_02 G_03 G_11 G_12 G_13 G_22 G_23 G_33, 0 the newest difference, float32 `[slots, 10]`.
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
            torch.zeros((slots, GRAM), dtype=torch.float32, device=device),
            torch.zeros((slots, 2), dtype=torch.float32, device=device),
            torch.zeros((slots, 4), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Boundary:
    """What is told of the rows.

    Attributes:
        hidden: h_t `[R, D]`.
        statistics: The numbers named in `STATISTICS`, float32 `[R, 8]`; 0 (residual 1) where nothing is watched.
        fates: Index into `FATES` of this loop, int32 `[R]`.
        decisions: `GOES_ON`, `MET`, `LAST_LOOP` or `DIVERGED`, int32 `[R]`.
    """

    hidden: Tensor
    statistics: Tensor
    fates: Tensor
    decisions: Tensor
