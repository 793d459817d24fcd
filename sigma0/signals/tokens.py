"""A new token, as text: its id, its depth, and what its loops and its reading tell."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate
from sigma0.signals.verdict import ReasonVerdict, of_token


@dataclass(frozen=True)
class Token:
    """A new token.

    Attributes:
        id: Its id.
        text: What it adds to the text; "" for special tokens and for bytes of a character that is not complete yet.
        depth: Loop at which it was read, from 1.
        reason: Why it stopped there, as `sigma0.decode.exits.exit_reason` names it.
        radius: Of the spectrum of its loops so far, as are the next two; None, like all below, where no verdict is
            asked for. In a finished generation the loops that ran behind its exit count too.
        angle: Radians.
        fate: The mildest of its last loops; None where too few were run.
        proximity: How near the text was to running in circles.
        margin: Lead of the likeliest id; None also where the logits are no numbers, as is the next.
        entropy: Of the distribution, nats.
        would_have_met: Under `full` and `fixed`, whether the checkpoint's own rule would have been met by that loop;
            None where its statistics do not say, and under rules, whose tokens say it by their reason.
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

    @property
    def verdict(self) -> ReasonVerdict:
        """On this token alone.

        Raises:
            ValueError: Where no verdict was asked for.
        """
        if self.proximity is None:
            raise ValueError("no verdict was asked for: pass verdict=True")
        return of_token(self.reason, self.depth, self.fate, self.proximity)


class StreamedToken(Token):
    """A token of a stream, until somebody looks at what its loops tell: then it is an ordinary one.

    Working that out for each token as it comes takes longer than a small model takes to write it.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _WORKED_OUT:
            self._work_out()
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        self._work_out()
        return self == other

    def __hash__(self) -> int:
        self._work_out()
        return hash(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._work_out()
        return self.__reduce_ex__(protocol)

    def wait(self, told: Callable[["Token"], "Token"]) -> "Token":
        """Itself, which asks for the same token with its figures once they are looked at."""
        object.__setattr__(self, "_told", told)
        return self

    def _work_out(self) -> None:
        told = self.__dict__.pop("_told")
        object.__setattr__(self, "__class__", Token)
        self.__dict__.update(vars(told(self)))


_WORKED_OUT = frozenset({"radius", "angle", "fate", "proximity", "margin", "entropy", "would_have_met"})
