"""Data of `loop_end.py`: weights, exit parameters, the state that a token carries from loop to loop, and the result."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Differences that are kept of a token, and the numbers of their symmetric Gram matrix.
KEPT = 4
GRAM_SIZE = KEPT * (KEPT + 1) // 2
# Places of G_ij among those numbers, 0 the newest difference.
G00, G01, G02, G03, G11, G12, G13, G22, G23, G33 = range(GRAM_SIZE)

MODES = ("none", "qexit", "converge", "accel", "accel-steps")
NONE, QEXIT, CONVERGE, ACCEL, ACCEL_STEPS = range(len(MODES))

Fate = Literal["contract", "spiral", "diverge"]
FATES: tuple[Fate | None, ...] = (None, "contract", "spiral", "diverge")
NO_FATE, CONTRACT, SPIRAL, DIVERGE = range(len(FATES))
# The fates of the last 15 loops lie in one int32, two bits each, the newest lowest.
FATE_BITS = 2
FATE_HISTORY_MASK = (1 << 30) - 1

GOES_ON, MET, LAST_LOOP, DIVERGED = range(4)

STATISTICS = ("change", "bend", "gain", "turning", "radius", "angle", "residual", "hazard")
CHANGE, BEND, GAIN, TURNING, RADIUS, ANGLE, RESIDUAL, HAZARD = range(len(STATISTICS))

# Places in a slot's `gate` and `counts`, and how many numbers each of the two holds.
SURVIVAL, CUMULATIVE, GATE_WIDTH = range(3)
LOOPS, STREAK, DIVERGING, FATE_HISTORY, COUNTS_WIDTH = range(5)


@dataclass(frozen=True)
class LoopEndWeights:
    """Weights of a model that are applied at the end of a loop."""

    norm: Tensor | None  # Weight of the RMSNorm, `[D]`; None where a loop ends without one
    norm_eps: float = 0.0  # Epsilon of the RMSNorm
    gate: Tensor | None = None  # Weight of the exit gate, `[D]`; None where there is none, so that its hazard is 0
    gate_bias: Tensor | None = None  # Bias of the exit gate, `[1]`; None likewise


@dataclass(frozen=True)
class ExitParams:
    """Parameters of the exit decision at the end of a loop."""

    mode: str  # One of `MODES`; with "none" no exit rule is evaluated here
    threshold: float  # q of `qexit`, eps of the others
    last_loop: int  # T, or k where all tokens stop at loop k
    patience: int = 2  # Consecutive loops on which `accel` must hold
    min_loops: int = 1  # No token stops before this loop
    watch: bool = True  # Whether differences are kept and statistics computed; without, `qexit` and "none" take less
    growth: float = 0.1  # m of the fate
    spiral: float = math.pi / 3  # theta of the fate, radians
    break_after: int = 0  # Consecutive loops with the fate `diverge` that stop a token; 0 never

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
        """Whether differences are kept: for the statistics, or since the decision needs them."""
        return self.watch or self.break_after > 0 or self.mode not in ("none", "qexit")

    @property
    def decides_by(self) -> str:
        """The mode that can be met: `qexit` at q = 1 means every loop, though float32 may round a sum to 1."""
        return "none" if self.mode == "qexit" and self.threshold >= 1 else self.mode

    @property
    def modes(self) -> frozenset[str]:
        """Which modes can be met: one, or none."""
        return frozenset({self.decides_by}) - {"none"}

    def decides(self, mode: str) -> bool:
        """Whether rows decide by a mode."""
        return self.decides_by == mode


@dataclass(frozen=True)
class RuleRows:
    """`ExitParams` of rows that need not share them."""

    modes: frozenset[str]  # Which of `MODES` may occur, "none" left out; no row decides by another
    mode: Tensor  # Index into `MODES`, int64 `[R]`; "none" where the rule can never be met
    threshold: Tensor  # float32 `[R]`
    last_loop: Tensor  # int64 `[R]`
    patience: Tensor  # int64 `[R]`
    min_loops: Tensor  # int64 `[R]`
    break_after: Tensor  # int64 `[R]`
    watch: bool  # Whether differences are kept and statistics computed
    growth: float  # As in `ExitParams`
    spiral: float  # As in `ExitParams`

    def __post_init__(self) -> None:
        unknown = sorted(self.modes - set(MODES[QEXIT:]))
        if unknown:
            raise ValueError(f"no such modes: {', '.join(unknown)}; there are {', '.join(MODES[QEXIT:])}")
        blind = sorted(self.modes - {"qexit"})
        if blind and not self.watch:
            raise ValueError(f"{', '.join(blind)} cannot be decided where no differences are kept: watch is False")

    @property
    def watches(self) -> bool:
        """As `ExitParams` has it."""
        return self.watch

    def decides(self, mode: str) -> Tensor | bool:
        """Which rows decide by a mode, bool `[R]`; False where none does."""
        return self.mode == MODES.index(mode) if mode in self.modes else False

    @classmethod
    def of(cls, params: ExitParams, rows: int, device: torch.device) -> "RuleRows":
        """The same parameters for every row."""

        def column(value: int) -> Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=device)

        return cls(
            params.modes,
            column(MODES.index(params.decides_by)),
            torch.full((rows,), params.threshold, dtype=torch.float32, device=device),
            column(params.last_loop),
            column(params.patience),
            column(params.min_loops),
            column(params.break_after),
            params.watches,
            params.growth,
            params.spiral,
        )


@dataclass(frozen=True)
class ExitState:
    """Per-token exit state carried between loops, updated in place; one slot per token in flight."""

    differences: Tensor  # The last D_t in a ring, D_t at t mod K, in the model's dtype `[slots, K, D]`
    gram: Tensor  # G_00 G_01 G_02 G_03 G_11 G_12 G_13 G_22 G_23 G_33, 0 the newest difference, float32 `[slots, 10]`
    gate: Tensor  # S_t and CDF_t, float32 `[slots, 2]`
    # Loops finished, `accel` streak, consecutive diverging loops, fate history; int32 `[slots, 4]`. A slot whose
    # first count is 0 is fresh, whatever else it holds
    counts: Tensor

    @classmethod
    def empty(cls, slots: int, width: int, dtype: torch.dtype, device: torch.device | str) -> "ExitState":
        """Fresh slots."""
        return cls(
            torch.zeros((slots, KEPT, width), dtype=dtype, device=device),
            torch.zeros((slots, GRAM_SIZE), dtype=torch.float32, device=device),
            torch.zeros((slots, GATE_WIDTH), dtype=torch.float32, device=device),
            torch.zeros((slots, COUNTS_WIDTH), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class LoopEndOutput:
    """Result of the end of a loop for R rows."""

    hidden: Tensor  # h_t `[R, D]`
    statistics: Tensor  # The numbers named in `STATISTICS`, float32 `[R, 8]`; 0 (residual 1) where nothing is watched
    fates: Tensor  # Index into `FATES` of this loop, int32 `[R]`
    decisions: Tensor  # `GOES_ON`, `MET`, `LAST_LOOP` or `DIVERGED`, int32 `[R]`
