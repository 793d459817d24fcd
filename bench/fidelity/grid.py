"""What is measured: exit rules on a grid of thresholds, and the baselines beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sigma0.bench.core.rows import Promise, row_key
from sigma0.commands.options import check_known
from sigma0.config import AfterExit, ExitConfig
from sigma0.models.exit_thresholds import ExitThresholds

# Thresholds of each rule, from eager to patient.
GRID: dict[str, tuple[float, ...]] = {
    "qexit": (0.3, 0.6, 0.9, 0.99, 0.999),
    "margin": (0.6, 0.9, 0.99, 0.999, 0.9999),
    "converge": (0.7, 0.5, 0.35, 0.25, 0.1),
    "accel": (0.7, 0.5, 0.35, 0.2, 0.1),
    "accel-steps": (0.5, 0.35, 0.25),
}
# One below the other: the loop as it is, a loop drawn by lot, and the earliest loops that change nothing.
BASELINES = ("fixed", "random", "oracle", "settled")
MODES = ("full", *GRID, *BASELINES)
# The rule whose exit depths the random baseline shuffles.
RANDOM_LIKE = "qexit"
# What a mode of `ExitConfig` reads, its threshold first.
_PARAMETERS = {
    "qexit": ("q",),
    "margin": ("theta",),
    "converge": ("eps",),
    "accel": ("eps", "patience"),
    "fixed": ("depth",),
}


@dataclass(frozen=True)
class Setting:
    """One way of decoding."""

    mode: str  # One of `MODES`
    config: ExitConfig  # The rule; for `random` the one whose exit depths are drawn from, for the oracles full depth
    # What the threshold was calibrated to keep, before and on other prompts; None on the grid
    promise: Promise | None = None

    @property
    def parameters(self) -> dict[str, float | int | str]:
        """The parameters of the mode, as a row names them."""
        like: dict[str, float | int | str] = {"like": self.config.mode} if self.mode == "random" else {}
        return {**like, **threshold(self.config)}

    @property
    def key(self) -> str:
        """The key of its row."""
        return row_key("fidelity", self.mode, self.config.after_exit, self.parameters)


def plan(
    modes: Sequence[str],
    after: Sequence[AfterExit],
    total_loops: int,
    grid: Mapping[str, Sequence[float]],
    calibrated: ExitThresholds | None = None,
) -> list[Setting]:
    """All settings to measure, full depth first, which is always among them.

    Where what becomes of the deeper loops changes nothing (`full`, `fixed`, the baselines), a mode is measured once. A
    grid replaces thresholds of `GRID`; those that the model was calibrated to stand in their places beside it.

    Raises:
        ValueError: For an unknown mode, an empty list or a threshold out of range.
    """
    for name in (*modes, *grid):
        check_known("mode", name, MODES)
    for name, values in grid.items():
        if name not in GRID:
            raise ValueError(f"mode {name!r} has no grid; {', '.join(GRID)} have")
        if name not in modes:
            raise ValueError(f"the grid names thresholds for {name!r}, which is not among the modes measured")
        if not values or len(set(values)) != len(values):
            raise ValueError(f"thresholds {list(values)} of {name!r}: at least one, each once")
    if not modes or not after:
        raise ValueError("name at least one mode and one setting of after_exit")
    thresholds = {**GRID, **{name: tuple(values) for name, values in grid.items()}}
    result = [Setting("full", ExitConfig(mode="full"))]
    for mode in (name for name in MODES if name in modes and name != "full"):
        if mode in GRID:
            known = _calibrated(mode, calibrated or ExitThresholds())
            for item in after:
                values = [value for value in thresholds[mode] if known is None or value != known.config.threshold]
                result += [Setting(mode, rule(mode, value, item)) for value in values]
                if known is not None:
                    result.append(replace(known, config=replace(known.config, after_exit=item)))
        elif mode == "fixed":
            result += [Setting(mode, ExitConfig(mode="fixed", depth=depth)) for depth in range(1, total_loops)]
        elif mode == "random":
            result += [Setting(mode, rule(RANDOM_LIKE, value, "finish")) for value in thresholds[RANDOM_LIKE]]
        else:
            result.append(Setting(mode, ExitConfig(mode="full")))
    return result


def _calibrated(mode: str, thresholds: ExitThresholds) -> Setting | None:
    name = mode.replace("-", "_")
    record = getattr(thresholds, name)
    return None if record is None else Setting(mode, thresholds.configs()[name], Promise.of(record))


def threshold(config: ExitConfig) -> dict[str, float | int | str]:
    """The parameters that the mode of a config reads."""
    return {name: getattr(config, name) for name in _PARAMETERS.get(config.mode, ())}


def rule(mode: str, threshold: float, after: AfterExit) -> ExitConfig:
    """The exit settings of a rule at a threshold; `accel` fires on a single loop, or it could hardly save any."""
    name = "accel" if mode == "accel-steps" else mode
    output: dict[str, Any] = {"mode": name, "after_exit": after, _PARAMETERS[name][0]: threshold}
    if name == "accel":
        output |= {"patience": 1} | ({} if mode == "accel" else {"accel_scale": "steps"})
    return ExitConfig(**output)
