"""What a ladder returns."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate
from sigma0.ladder.budget import RungCost, Spending, total_bytes
from sigma0.ladder.trail import Trail, Unit
from sigma0.signals.grounding.check import Grounding
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import Door, ReasonVerdict

LadderStop = Literal["eos", "stop", "length", "collapse", "budget"]


@dataclass(frozen=True)
class LadderToken:
    """A new token.

    Attributes:
        id: Its id.
        text: What it adds to the text.
        rung: Name of the rung that wrote it.
        depth: Loop it was read at; 0 of a model without loops.
        reason: Why it was read there; None of a model without loops.
        fate: Of its loops, as far as they were run by then.
        proximity: How near the text before it was to running in circles.
        margin: Lead of its likeliest id.
        entropy: Of the distribution, nats.
        handed_up: Why it left the lowest rung; None where it did not.
        low_confidence: Whether it would have gone up, had the budget allowed.
        deepest_surprise: What the head says of it after the last loop that was run, of an answer that one looped model
            wrote as a whole (`sigma0.signals.tokens.Token`); else None, as are the next three.
        deepest_entropy: Likewise.
        deepest_margin: Likewise.
        deepest_agrees: Likewise.
    """

    id: int
    text: str
    rung: str
    depth: int
    reason: Reason | None
    fate: Fate | None
    proximity: float
    margin: float | None
    entropy: float | None
    handed_up: str | None
    low_confidence: bool
    deepest_surprise: float | None = None
    deepest_entropy: float | None = None
    deepest_margin: float | None = None
    deepest_agrees: bool | None = None


def ladder_token(token: Token, rung: str, handed_up: str | None = None) -> LadderToken:
    """A token of a text that a looped model wrote as a whole.

    Args:
        token: Of the model, with its statistics.
        rung: Name of the rung.
        handed_up: Why the text left the lowest rung; None where it did not.
    """
    return LadderToken(
        id=token.id,
        text=token.text,
        rung=rung,
        depth=token.depth,
        reason=token.reason,
        fate=token.fate,
        proximity=token.proximity or 0.0,
        margin=token.margin,
        entropy=token.entropy,
        handed_up=handed_up,
        low_confidence=False,
        deepest_surprise=token.deepest_surprise,
        deepest_entropy=token.deepest_entropy,
        deepest_margin=token.deepest_margin,
        deepest_agrees=token.deepest_agrees,
    )


@dataclass(frozen=True)
class LadderGeneration:
    """What came of one prompt.

    Attributes:
        text: The new text.
        unit: What could go up.
        rung: Name of the rung that wrote the answer; of drafts and tokens, of the highest one that wrote any.
        tokens: The new tokens; empty of drafts. Of a text that was written as a whole those of the rung that wrote it,
            and empty for rungs without token statistics (endpoints, models without loops).
        drafts: Name of the rung and text of each draft, where the unit is the draft; else empty.
        verdict: On the whole text.
        grounding: The claims of the text, looked up in prompt and sources.
        door: `converge`: the verdict is in order; `abort`: something would have gone up, had the budget allowed, or the
            verdict is not in order and no rung is left to be asked; `escalate`: the verdict is not in order and a rung
            is left, but a policy of the caller's own decides what goes up, and let it stand, or its tokens were
            streamed or drawn and cannot be taken back. Else what the verdict does not let pass goes up.
        top_rung: Whether the highest rung was asked, so that none is left.
        stop_reason: Why the text ends; `budget`: not even the lowest rung could go on.
        not_tried: Rung and limit of each kind of step that the budget refused.
        costs: Of each rung; in a batch, of all its sequences together.
        spent: Of the budget.
        seconds: From the first step to the last.
        trail: Every decision; in a batch, of all its sequences together.
    """

    text: str
    unit: Unit
    rung: str
    tokens: tuple[LadderToken, ...]
    drafts: tuple[tuple[str, str], ...]
    verdict: ReasonVerdict
    grounding: Grounding
    door: Door
    top_rung: bool
    stop_reason: LadderStop
    not_tried: tuple[str, ...]
    costs: tuple[RungCost, ...]
    spent: Spending
    seconds: float
    trail: Trail

    @property
    def low_confidence(self) -> bool:
        """Whether the budget kept something from going up."""
        return bool(self.not_tried)

    @property
    def bytes_read(self) -> int:
        """Passes times block bytes over all rungs, prompts included."""
        return total_bytes(self.costs)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the trail is written by itself."""
        return {
            "text": self.text,
            "unit": self.unit,
            "rung": self.rung,
            "door": self.door,
            "top_rung": self.top_rung,
            "low_confidence": self.low_confidence,
            "stop_reason": self.stop_reason,
            "not_tried": list(self.not_tried),
            "verdict": self.verdict.to_dict(),
            "grounding": asdict(self.grounding),
            "tokens": [asdict(token) for token in self.tokens],
            "drafts": [{"rung": rung, "text": text} for rung, text in self.drafts],
            "costs": [cost.to_dict() for cost in self.costs],
            "spent": asdict(self.spent),
            "seconds": self.seconds,
            "bytes_read": self.bytes_read,
        }
