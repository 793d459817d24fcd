"""When a unit goes up, and how long a larger model then stays: frozen messages that JSON can hold."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from sigma0.errors import one_line
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict, objections

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Signs:
    """What is known of a unit before it is accepted.

    Attributes:
        sequence: Batch index.
        position: Number of the token, draft or answer in its sequence, from 0.
        verdict: On the unit.
        entropy: Of the token's distribution, nats; the mean over a longer unit; None where unknown.
        margin: Lead of the token's likeliest id; the least over a longer unit; None where unknown.
    """

    sequence: int
    position: int
    verdict: ReasonVerdict
    entropy: float | None = None
    margin: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "sequence": self.sequence,
            "position": self.position,
            "verdict": self.verdict.to_dict(),
            "entropy": self.entropy,
            "margin": self.margin,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Signs":
        """The same out of JSON values.

        Raises:
            ValueError: For anything else.
        """
        return _SIGNS.validate_python(dict(value))


_SIGNS = TypeAdapter(Signs)


class Trigger(Protocol):
    """Says why a unit goes up."""

    def fires(self, signs: Signs) -> str | None:
        """The reason in a few words, or None where the unit stays."""


@checked(frozen=True, config=_STRICT)
class Always:
    """Every unit."""

    kind: Literal["always"] = field(default="always", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """Always."""
        return "always"


@checked(frozen=True, config=_STRICT)
class Never:
    """No unit."""

    kind: Literal["never"] = field(default="never", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """Never."""
        return None


@checked(frozen=True, config=_STRICT)
class Saturation:
    """A unit that reached full depth without meeting its exit rule."""

    kind: Literal["saturation"] = field(default="saturation", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the verdict's reason."""
        return "saturated" if signs.verdict.reason == "max_depth" else None


@checked(frozen=True, config=_STRICT)
class Divergence:
    """A unit whose loop diverges."""

    kind: Literal["divergence"] = field(default="divergence", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By fate or reason."""
        verdict = signs.verdict
        return "diverging" if verdict.stable == "diverge" or verdict.reason == "divergence" else None


@checked(frozen=True, config=_STRICT)
class Collapse:
    """A text that runs in circles.

    Attributes:
        above: Proximity from which on it does, in [0, 1].
    """

    above: Annotated[float, Field(ge=0, le=1)] = 0.5
    kind: Literal["collapse"] = field(default="collapse", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the verdict's proximity."""
        proximity = signs.verdict.proximity
        return f"proximity {proximity:.2f}" if proximity >= self.above else None


@checked(frozen=True, config=_STRICT)
class Ungrounded:
    """A unit with claims that nothing anchors.

    Attributes:
        below: Groundedness up to which it fires, in [0, 1].
        unknown: Whether it fires where nothing could be checked.
    """

    below: Annotated[float, Field(ge=0, le=1)] = 0.5
    unknown: bool = False
    kind: Literal["ungrounded"] = field(default="ungrounded", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the verdict's groundedness."""
        grounded = signs.verdict.grounded
        if grounded is None:
            return "groundedness unknown" if self.unknown else None
        return f"grounded {grounded:.2f}" if grounded <= self.below else None


@checked(frozen=True, config=_STRICT)
class Entropy:
    """An unsure unit; one whose entropy is not known does not fire.

    Attributes:
        above: Nats, at least 0.
    """

    above: Annotated[float, Field(ge=0)]
    kind: Literal["entropy"] = field(default="entropy", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the entropy."""
        return f"entropy {signs.entropy:.2f}" if signs.entropy is not None and signs.entropy > self.above else None


@checked(frozen=True, config=_STRICT)
class Margin:
    """A unit whose likeliest id hardly leads; one whose margin is not known does not fire.

    Attributes:
        below: In [0, 1].
    """

    below: Annotated[float, Field(ge=0, le=1)]
    kind: Literal["margin"] = field(default="margin", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the margin."""
        return f"margin {signs.margin:.2f}" if signs.margin is not None and signs.margin < self.below else None


@checked(frozen=True, config=_STRICT)
class Doubt:
    """A unit of too little confidence; one whose confidence is not known does not fire.

    Attributes:
        below: In [0, 1]; of a token exp(-entropy), so 0.6 is an entropy of 0.51 nats.
    """

    below: Annotated[float, Field(ge=0, le=1)]
    kind: Literal["doubt"] = field(default="doubt", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the verdict's confidence."""
        confidence = signs.verdict.confidence
        return f"confidence {confidence:.2f}" if confidence is not None and confidence < self.below else None


@checked(frozen=True, config=_STRICT)
class Random:
    """A share of the units, chosen by chance alone: what others are measured against.

    Whether a unit fires depends on the seed, its sequence and its position, so that a trail replays.

    Attributes:
        rate: Chance of each, in [0, 1].
        seed: Of the draws.
    """

    rate: Annotated[float, Field(ge=0, le=1)]
    seed: int = 0
    kind: Literal["random"] = field(default="random", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By chance."""
        drawn = random.Random(f"{self.seed}/{signs.sequence}/{signs.position}").random()
        return "chance" if drawn < self.rate else None


@checked(frozen=True, config=_STRICT)
class ShutDoor:
    """A unit whose verdict does not open the converge door; the default for drafts and answers.

    Attributes:
        policy: What the door asks for.
    """

    policy: DoorPolicy = field(default_factory=DoorPolicy)
    kind: Literal["shut_door"] = field(default="shut_door", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """By the door."""
        return "; ".join(objections(signs.verdict, self.policy)) or None


@checked(frozen=True, config=_STRICT)
class AnyOf:
    """Fires where one of several does.

    Attributes:
        triggers: At least one.
    """

    triggers: Annotated[tuple["AnyTrigger", ...], Field(min_length=1)]
    kind: Literal["any_of"] = field(default="any_of", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """The first reason."""
        return next((why for why in (trigger.fires(signs) for trigger in self.triggers) if why is not None), None)


@checked(frozen=True, config=_STRICT)
class AllOf:
    """Fires where all of several do.

    Attributes:
        triggers: At least one.
    """

    triggers: Annotated[tuple["AnyTrigger", ...], Field(min_length=1)]
    kind: Literal["all_of"] = field(default="all_of", kw_only=True)

    def fires(self, signs: Signs) -> str | None:
        """All reasons."""
        reasons = [trigger.fires(signs) for trigger in self.triggers]
        return None if None in reasons else ", ".join(str(why) for why in reasons)


AnyTrigger = Annotated[
    Always
    | Never
    | Saturation
    | Divergence
    | Collapse
    | Ungrounded
    | Entropy
    | Margin
    | Doubt
    | Random
    | ShutDoor
    | AnyOf
    | AllOf,
    Field(discriminator="kind"),
]
TRIGGER: TypeAdapter[Any] = TypeAdapter(AnyTrigger)


def trigger_to_dict(trigger: Trigger) -> dict[str, Any]:
    """Plain JSON values."""
    return cast(dict[str, Any], TRIGGER.dump_python(trigger, mode="json"))


def trigger_from_dict(value: Mapping[str, Any]) -> Trigger:
    """A trigger out of JSON values.

    Raises:
        ValueError: For an unknown kind or a bad value, naming it.
    """
    try:
        return cast(Trigger, TRIGGER.validate_python(dict(value)))
    except ValidationError as error:
        raise ValueError(one_line(error)) from error


@checked(frozen=True, config=_STRICT)
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
