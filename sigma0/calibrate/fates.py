"""Where a model's loops ordinarily go: settings of spiralling and diverging that leave its common course alone."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sigma0.config import BREAK_AFTER, FateConfig
from sigma0.decode.ops import FATES, Fate
from sigma0.signals.trajectory import fates_under
from sigma0.signals.verdict import DoorPolicy, aggregate, mildest, part_of

GROWTHS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
ANGLES = (60.0, 75.0, 90.0, 105.0, 120.0, 150.0, 180.0)
# Tokens, and answers, of a model's ordinary course that may spiral.
SPIRALLING = 0.05
SPIRAL_SHARES = (0.25, 0.5, 0.75, 1.0)


def fit_fates(paths: Sequence[Tensor], dtype: torch.dtype = torch.float32, patience: int = 2) -> FateConfig:
    """Settings under which a model's ordinary course raises no alarm; never below the defaults.

    The growth is the least on a grid at which no loop diverges `BREAK_AFTER` times running, the angle the least at
    which at most `SPIRALLING` of the tokens spiral in their last loops.

    Args:
        paths: `loop_statistics` of texts, each `[n, T, 8]`.
        dtype: Of the states.
        patience: Loops of which the mildest fate is a token's.
    """
    every = torch.cat(list(paths))

    def breaks(growth: float) -> bool:
        diverging = fates_under(every, FateConfig(growth=growth), dtype) == FATES.index("diverge")
        running = diverging.unfold(-1, min(BREAK_AFTER, diverging.shape[-1]), 1).all(-1)  # [n, T - BREAK_AFTER + 1]
        return bool(running.any())

    growth = next((growth for growth in GROWTHS if not breaks(growth)), GROWTHS[-1])

    def spiralling(angle: float) -> float:
        last = token_fates(every, FateConfig(growth, angle), dtype, patience)
        known = [fate for fate in last if fate is not None]
        return known.count("spiral") / max(1, len(known))

    angle = next((angle for angle in ANGLES if spiralling(angle) <= SPIRALLING), ANGLES[-1])
    return FateConfig(growth, angle)


def token_fates(paths: Tensor, fates: FateConfig, dtype: torch.dtype, patience: int) -> list[Fate | None]:
    """The fate of each token, `[n]`, under settings of spiralling and diverging.

    Args:
        paths: Loop statistics, `[n, T, 8]`.
        fates: The settings.
        dtype: Of the states.
        patience: Loops of which the mildest fate is a token's.
    """
    codes = fates_under(paths, fates, dtype).tolist()
    return [mildest([FATES[code] for code in known if code], patience) for known in codes]


def fit_spiral_share(answers: Sequence[Sequence[Fate | None]], policy_before: DoorPolicy | None = None) -> float:
    """The least share of spiralling tokens on a grid that at most `SPIRALLING` of the answers exceed.

    Args:
        answers: Fates of the tokens of each.
        policy_before: What the rest of the policy is.
    """
    for allowed in SPIRAL_SHARES:
        policy = replace(policy_before or DoorPolicy(), spiral_share=allowed)
        stable = [aggregate([part_of(None, 0, fate, 0.0) for fate in fates], policy).stable for fates in answers]
        if stable.count("spiral") <= SPIRALLING * len(stable):
            return allowed
    return SPIRAL_SHARES[-1]
