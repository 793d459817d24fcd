"""`reasoning_effort` as exit settings: how deep a looped model thinks, as changes over the checkpoint's own setting.

| effort | `q`, `theta`, fixed `depth` | `eps` | `min_loops` | `after_exit` |
|---|---|---|---|---|
| `minimal` | times 1/2 | times 2 | own | own |
| `low` | times 3/4 | times 4/3 | own | own |
| `medium` | own | own | own | own |
| `high` | own | own | at least T/2, rounded up | `verify`: full depth's own text, and still a verdict |

A checkpoint whose own setting is full depth, or a fixed one, has no rule to make more eager or check: there `low` and
`minimal` stop at a fixed share of its loops, and `high` is full depth. What an effort saves, and what it costs in
accuracy, is a matter of the model: measure it.
"""

import math
from dataclasses import replace
from typing import Literal

from sigma0.settings import ExitConfig

Effort = Literal["minimal", "low", "medium", "high"]
SHARES: dict[Effort, float] = {"minimal": 0.5, "low": 0.75, "medium": 1.0, "high": 1.0}


def exit_for(effort: Effort, own: ExitConfig, total_loops: int) -> ExitConfig:
    """The exit setting of an effort.

    Args:
        effort: How long tokens should loop.
        own: The model's setting, as `resolve_exit_config` has it.
        total_loops: T.
    """
    fixed = own.mode in ("full", "fixed")
    if effort == "high":
        if fixed:
            return replace(own, mode="full", depth=None)
        return replace(own, min_loops=max(own.min_loops, math.ceil(total_loops / 2)), after_exit="verify")
    share = SHARES[effort]
    if share == 1.0:
        return own
    if fixed:
        return replace(own, mode="fixed", depth=math.ceil(share * (own.stops_at(total_loops) or total_loops)))
    own = own.filled()
    eager: dict[str, float | None] = {"q": own.q, "theta": own.theta, "eps": own.eps}
    factors = {"q": share, "theta": share, "eps": 1 / share}
    # as decimals: 0.6 * 0.75 is to be told as 0.45
    changed = {name: round(value * factors[name], 6) for name, value in eager.items() if value is not None}
    return replace(own, **changed)  # type: ignore[arg-type]
