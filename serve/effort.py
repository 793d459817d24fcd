"""`reasoning_effort` as exit settings: changes over the model's own.

| effort | change |
|---|---|
| `minimal` | tokens stop sooner: `q`, `theta` and a fixed `depth` times 1/2, `eps` times 2 |
| `low` | the same with 3/4 |
| `medium` | none: the checkpoint's own setting |
| `high` | full depth |

A checkpoint whose own setting is full depth has no rule to make more eager: there `low` and `minimal` stop at a fixed
share of its loops. What an effort saves, and what it costs in accuracy, is a matter of the model: measure it.
"""

import math
from dataclasses import replace
from typing import Literal

from sigma0.settings import ExitConfig

Effort = Literal["minimal", "low", "medium", "high"]
# None: full depth
SHARES: dict[Effort, float | None] = {"minimal": 0.5, "low": 0.75, "medium": 1.0, "high": None}


def exit_for(effort: Effort, own: ExitConfig, total_loops: int) -> ExitConfig:
    """The exit setting of an effort.

    Args:
        effort: How long tokens should loop.
        own: The model's setting.
        total_loops: T.
    """
    share = SHARES[effort]
    if share is None:
        return replace(own, mode="full", depth=None)
    if share == 1.0:
        return own
    if own.mode in ("full", "fixed"):
        return replace(own, mode="fixed", depth=math.ceil(share * (own.stops_at(total_loops) or total_loops)))
    # as decimals: 0.6 * 0.75 is to be told as 0.45
    return replace(own, q=round(own.q * share, 6), theta=round(own.theta * share, 6), eps=round(own.eps / share, 6))
