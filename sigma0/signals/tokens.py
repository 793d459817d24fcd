"""A new token: its text, its exit depth, and the statistics of its loops and logits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sigma0.decode.exits import ExitRule, Reason
from sigma0.decode.ops import FATES, LOGIT_STATS, STATISTICS, Fate
from sigma0.decode.stats import Deepest
from sigma0.signals.verdict import ReasonVerdict, mildest, of_token

Floats = NDArray[np.float32]
_RADIUS, _ANGLE = STATISTICS.index("radius"), STATISTICS.index("angle")
_PROXIMITY, _MARGIN, _ENTROPY = (LOGIT_STATS.index(name) for name in ("proximity", "margin", "entropy"))


@dataclass(frozen=True)
class Token:
    """A new token.

    Attributes:
        id: Its id.
        text: What it adds to the text; "" for special tokens and for bytes of a character that is not complete yet.
        depth: Loop at which it was read, from 1.
        reason: Why it stopped there, as `sigma0.decode.exits.exit_reason` names it.
        radius: Spectral radius of its loops so far. None without a verdict, as are all fields below. In a finished
            generation the loops that ran after its exit count too.
        angle: Angle of the same spectrum, radians.
        fate: Convergence class: the mildest of its last loops; None where too few were run.
        proximity: Repetition score of the text up to this token, in [0, 1].
        margin: Top-1 probability minus top-2; None for logits that are not finite.
        entropy: Of the distribution, nats; None for logits that are not finite.
        would_have_met: Under `full` and `fixed`, whether the checkpoint's exit rule would have been met by that loop;
            None where the statistics do not say, and under an exit rule, where `reason` says it.
        deepest_surprise: Minus log probability of the token after the last loop that was run, nats: at its exit or
            deeper. None in a stream, where later loops may follow, and where it cannot be known
            (`sigma0.decode.stats`); as are the next three.
        deepest_entropy: Of the distribution there, nats.
        deepest_margin: Top-1 probability minus top-2 there.
        deepest_agrees: Whether the token is the likeliest one there.
    """

    id: int
    text: str
    depth: int
    reason: Reason
    radius: float | None = None
    angle: float | None = None
    fate: Fate | None = None
    proximity: float | None = None
    margin: float | None = None
    entropy: float | None = None
    would_have_met: bool | None = None
    deepest_surprise: float | None = None
    deepest_entropy: float | None = None
    deepest_margin: float | None = None
    deepest_agrees: bool | None = None

    @property
    def verdict(self) -> ReasonVerdict:
        """On this token alone.

        Raises:
            ValueError: Without statistics.
        """
        if self.proximity is None:
            raise ValueError("no verdict was asked for: pass verdict=True")
        return of_token(self.reason, self.depth, self.fate, self.proximity, self.entropy)


def with_statistics(
    tokens: Sequence[Token],
    paths: Floats,
    fates: NDArray[np.int8],
    logit_stats: Floats,
    patience: int,
    rule: ExitRule | None = None,
    max_loops: int | None = None,
    deepest: Floats | None = None,
) -> tuple[Token, ...]:
    """The tokens with their statistics.

    Args:
        tokens: N consecutive tokens.
        paths: Statistics of each loop (`decode.ops.STATISTICS`), `[N, T, 8]`; NaN where no loop was run.
        fates: Index into `decode.ops.FATES` of each loop, `[N, T]`.
        logit_stats: Statistics of the logits (`decode.ops.LOGIT_STATS`), `[N, 8]`.
        patience: Loops of which the mildest fate is a token's.
        rule: Sets `would_have_met`; None leaves it None.
        max_loops: How many loops of each token count; None: all that were run.
        deepest: What the head says after the last loops (`decode.stats.DEEPEST`), `[N, 4]`; None leaves it unknown.
    """
    loops_run = np.isfinite(paths[:, :, 0]).sum(axis=1)
    if max_loops is not None:
        loops_run = np.minimum(loops_run, max_loops)
    last = paths[np.arange(len(paths)), loops_run - 1]  # [N, 8]
    numbers = [last[:, _RADIUS], last[:, _ANGLE], *logit_stats[:, [_PROXIMITY, _MARGIN, _ENTROPY]].T]
    rows = np.stack(numbers, axis=1).tolist()
    described = []
    fate_of: dict[tuple[int, ...], Fate | None] = {}  # few paths differ
    last_read = [Deepest()] * len(tokens) if deepest is None else [Deepest.of(row) for row in deepest.tolist()]
    item = zip(tokens, paths, rows, fates.tolist(), loops_run.tolist(), last_read, strict=True)
    for token, path, row, codes, count, read in item:
        radius, angle, proximity, margin, entropy = map(_finite, row)
        path_fates = tuple(codes[:count])
        if path_fates not in fate_of:
            fate_of[path_fates] = mildest([FATES[code] for code in path_fates], patience)
        met = None if rule is None else rule.would_have_been_met(path[:count], margin)
        figures = (radius, angle, fate_of[path_fates], proximity, margin, entropy, met, *read)
        described.append(Token(token.id, token.text, token.depth, token.reason, *figures))
    return tuple(described)


def _finite(value: float) -> float | None:
    """A number that JSON can hold; None for NaN and infinity."""
    return value if math.isfinite(value) else None


class StreamedToken(Token):
    """A token of a stream whose statistics are computed at first use; it then turns into an ordinary `Token`.

    Computing them for every token as it comes takes longer than a small model takes to decode it.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _COMPUTED:
            self._compute()
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        self._compute()
        return self == other

    def __hash__(self) -> int:
        self._compute()
        return hash(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._compute()
        return self.__reduce_ex__(protocol)

    def defer(self, statistics: Callable[["Token"], "Token"]) -> "Token":
        """Itself; `statistics` gives the same token with its figures, and is called when one of them is read."""
        object.__setattr__(self, "_statistics", statistics)
        return self

    def _compute(self) -> None:
        statistics = self.__dict__.pop("_statistics")
        object.__setattr__(self, "__class__", Token)
        self.__dict__.update(vars(statistics(self)))


# every field that only statistics give; those of the deepest loop stay None
_COMPUTED = frozenset(field.name for field in fields(Token)) - {"id", "text", "depth", "reason"}
