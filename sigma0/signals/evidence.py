"""Evidence of doubt: what is known of an answer's tokens, as numbers that rise with the chance of a wrong answer.

A *sign* is one number of a token, turned so that more of it is more doubt. Over the tokens of an answer it becomes
three features: `mean`, `most` (the greatest) and `worst` (the mean of the worst tenth, at least one token). Beside them
stand `length` and `ungrounded`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate

Floats = NDArray[np.float64]

SIGNS = (
    "entropy",
    "doubt",
    "depth",
    "unmet",
    "proximity",
    "spiral",
    "diverge",
    "deepest_surprise",
    "deepest_entropy",
    "deepest_doubt",
    "deepest_differs",
    "entropy_rise",
)
SUMMARIES = ("mean", "most", "worst")
FEATURES = (*(f"{summary}_{sign}" for sign in SIGNS for summary in SUMMARIES), "length", "ungrounded")
# Share of the tokens that `worst` is over.
_WORST = 0.1


class Observed(Protocol):
    """A token with its readings, as `sigma0.signals.tokens.Token` and the server's outputs have them."""

    @property
    def depth(self) -> int:
        """Loop that it was read at."""

    @property
    def reason(self) -> Reason | None:
        """Why it was read there."""

    @property
    def fate(self) -> Fate | None:
        """Of its loops."""

    @property
    def proximity(self) -> float | None:
        """Repetition score of the text."""

    @property
    def margin(self) -> float | None:
        """Top-1 probability minus top-2."""

    @property
    def entropy(self) -> float | None:
        """Nats."""

    @property
    def deepest_surprise(self) -> float | None:
        """Minus the log-probability of its id at the deepest loop that it has run, nats."""

    @property
    def deepest_entropy(self) -> float | None:
        """Entropy there."""

    @property
    def deepest_margin(self) -> float | None:
        """Margin there."""

    @property
    def deepest_agrees(self) -> bool | None:
        """Whether its id is the likeliest there."""


def evidence_of(tokens: Sequence[Observed], total_loops: int, grounded: float | None) -> Floats:
    """The features of an answer, in the order of `FEATURES`, `[F]`; NaN where one is not known of every token.

    Args:
        tokens: Of the answer, at least one.
        total_loops: T.
        grounded: Groundedness of its text; None where nothing could be checked, which is no doubt.

    Raises:
        ValueError: For no tokens.
    """
    if not tokens:
        raise ValueError("an answer without tokens gives no evidence")
    signs = np.array([_signs(token, total_loops) for token in tokens], dtype=np.float64)  # [n, S]
    # NaN sorts last, and so into every summary
    ranked = np.sort(signs, axis=0)
    worst = ranked[-max(1, round(_WORST * len(ranked))) :].mean(0)
    summaries = np.stack([signs.mean(0), ranked[-1], worst], axis=1)  # [S, 3]
    rest = (float(len(tokens)), 0.0 if grounded is None else 1 - grounded)
    return np.concatenate([summaries.ravel(), rest])


def _signs(token: Observed, total_loops: int) -> tuple[float, ...]:
    entropy, deepest = _known(token.entropy), _known(token.deepest_entropy)
    return (
        entropy,
        1 - _known(token.margin),
        token.depth / total_loops,
        float(token.reason == "max_depth"),
        _known(token.proximity),
        float(token.fate == "spiral"),
        float(token.fate == "diverge"),
        _known(token.deepest_surprise),
        deepest,
        1 - _known(token.deepest_margin),
        1 - _known(token.deepest_agrees),
        max(0.0, deepest - entropy) if np.isfinite(deepest - entropy) else np.nan,
    )


def _known(value: float | None) -> float:
    return np.nan if value is None else value
