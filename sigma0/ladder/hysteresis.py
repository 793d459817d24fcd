"""How long a larger model keeps writing once a token has gone up to it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Hysteresis:
    """Hand-ups cluster, and each one after a pause has to be caught up on.

    Attributes:
        stay: Further tokens that the larger model writes at least.
        leave: It goes on while the margin of its last token is under this, in [0, 1]; None: it does not.
    """

    stay: Annotated[int, Field(ge=0)] = 0
    leave: Annotated[float, Field(ge=0, le=1)] | None = None


@dataclass
class _Place:
    rung: int = 0
    left: int = 0
    margin: float | None = None


class Parking:
    """Where the next token of each sequence begins.

    Args:
        hysteresis: How long a larger model stays.
    """

    def __init__(self, hysteresis: Hysteresis) -> None:
        self.hysteresis = hysteresis
        self._places: dict[int, _Place] = {}

    def start(self, sequence: int) -> int:
        """The rung that the next token of a sequence begins at, 0 the lowest."""
        place = self._places.get(sequence, _Place())
        leave = self.hysteresis.leave
        unsure = leave is not None and place.margin is not None and place.margin < leave
        return place.rung if place.left > 0 or unsure else 0

    def wrote(self, sequence: int, rung: int, handed_up: bool, margin: float | None) -> None:
        """A token of a sequence was settled.

        Args:
            sequence: Batch index.
            rung: That wrote it.
            handed_up: Whether it went up to that rung in this token; one that was parked there did not.
            margin: Of that rung.
        """
        before = self._places.get(sequence, _Place())
        left = self.hysteresis.stay if handed_up else max(0, before.left - 1)
        self._places[sequence] = _Place(rung, left if rung else 0, margin if rung else None)
