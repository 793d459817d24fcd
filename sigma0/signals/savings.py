"""The three savings of adaptive depth, kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """Shares saved against full depth, over the tokens after each sequence's first; None where there are none."""

    mean_depth: float | None  # Mean exit depth
    # 1 - sum of exit depths / (T * tokens): notional, the passes that a single sequence would save
    depth_saved: float | None
    passes_saved: float | None  # 1 - passes / (T * tokens of the longest sequence): latency at small batch follows it
    rows_saved: float | None  # 1 - rows / (T * tokens): block arithmetic; tokens that run on after their exit save none


def savings(depths: Sequence[Sequence[int]], passes: int, rows: int, total_loops: int) -> Savings:
    """Savings of one batch.

    Args:
        depths: Exit depths of the new tokens of each sequence, the first (read from the prompt) included.
        passes: Calls of the shared block after the prompt.
        rows: Rows in those calls.
        total_loops: T.

    Returns:
        The three shares and the mean depth.
    """
    tokens = sum(max(len(row) - 1, 0) for row in depths)
    if tokens == 0:
        return Savings(None, None, None, None)
    spent = sum(sum(row[1:]) for row in depths)
    longest = max(len(row) for row in depths) - 1
    return Savings(
        mean_depth=spent / tokens,
        depth_saved=1 - spent / (total_loops * tokens),
        passes_saved=1 - passes / (total_loops * longest),
        rows_saved=1 - rows / (total_loops * tokens),
    )
