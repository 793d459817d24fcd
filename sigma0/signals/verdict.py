"""The verdict (confidence report) on a token, a draft or a whole answer, and its door (routing decision).

    converge  what the policy's rule asks for is there: accept at the cheapest rung
    escalate  anything less: think on, or hand up
    abort     the same with no budget left, or nothing left to ask: an answer marked as of low confidence

A policy has one of two rules. Both ask for a text that does not repeat itself and for claims with an anchor.

    confidence   the confidence is high enough; a loop that was broken off and a question unlike those of the
                 calibration are vetoes
    certificate  the loop's own account: its exit rule was met by itself and its steps contract; no confidence is read

Unknown never counts as good: what a rule reads and is None declines to converge.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from sigma0.config import Stored
from sigma0.decode.exits import Reason
from sigma0.decode.ops import Fate
from sigma0.errors import one_line_constructor

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Door = Literal["converge", "escalate", "abort"]
DoorRule = Literal["confidence", "certificate"]
# Whether an exit reason means convergence; for `fixed`, and without a loop, that is unknown.
CONVERGED: dict[str, bool] = {
    "threshold_met": True,
    "fixed_point": True,
    "accel_fixed_point": True,
    "confident": True,
    "max_depth": False,
    "collapse": False,
    "divergence": False,
}
# Reasons that keep the door shut whatever else is known; the last is the rule's own.
_BROKEN = ("collapse", "divergence", "ungrounded")
VETOES: dict[DoorRule, frozenset[str]] = {
    "confidence": frozenset({*_BROKEN, "out_of_calibration"}),
    "certificate": frozenset({*_BROKEN, "max_depth"}),
}
_MILDNESS: tuple[Fate, ...] = ("contract", "spiral", "diverge")


class TokenPart(NamedTuple):
    """What `aggregate` takes of a token: the fields of its `ReasonVerdict`, not checked."""

    converged: bool | None
    depth: float
    proximity: float
    grounded: float | None
    stable: Fate | None
    reason: Reason | None
    confidence: float | None


class ReasonVerdict(BaseModel):
    """Confidence report on a unit of generation; the same shape for a token, a draft and an answer.

    Every combination of fields can be built. `model_dump_json` and `model_validate_json` convert to and from JSON;
    `model_json_schema()` is the schema published as `verdict.schema.json` beside this file.

    Attributes:
        converged: Whether the exit rule was met; None where that is unknown.
        depth: Mean exit depth in loops.
        proximity: Repetition score in [0, 1].
        grounded: Share of checkable claims with an anchor; None where nothing was checkable or checked.
        stable: Fate (convergence class) of the loop; None where unknown.
        reason: Exit reason; None where there was no loop.
        confidence: Probability that it is right, as calibrated (`sigma0.signals.confidence`); without a calibration
            exp(-mean entropy), a score and no probability. None where unknown.
    """

    # strict: refuses what the schema refuses, such as "yes" for true
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    converged: bool | None
    depth: float = Field(ge=0)
    proximity: float = Field(ge=0, le=1)
    grounded: float | None = Field(ge=0, le=1)
    stable: Fate | None
    reason: Reason | None
    confidence: float | None = Field(default=None, ge=0, le=1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")


@one_line_constructor
@checked(frozen=True, config=ConfigDict(extra="forbid"))
class DoorPolicy(Stored):
    """Thresholds of the converge door, and of what a verdict calls things.

    Attributes:
        min_confidence: The confidence must reach it; read by the rule `confidence` alone.
        tau_c: The proximity must be under it.
        tau_g: The groundedness must be over it; None asks for none.
        require_grounding: Whether unknown groundedness declines.
        patience: A token's fate is the mildest of its last `patience` loops.
        spiral_share: A draft or answer spirals if more than this share of its tokens with a fate do.
        saturated_share: It is saturated if more than this share of its tokens are.
        rule: `confidence`, or `certificate`: converged and contracting, whatever the confidence.
    """

    stored_as: ClassVar[str] = "door_policy"

    min_confidence: Share = 0.9
    tau_c: Share = 0.5
    tau_g: Share | None = 0.5
    require_grounding: bool = False
    patience: Annotated[int, Field(ge=1)] = 2
    spiral_share: Share = 0.25
    saturated_share: Share = 0.1
    rule: DoorRule = "confidence"


def door(verdict: ReasonVerdict, policy: DoorPolicy | None = None, budget_left: bool = True) -> Door:
    """The routing decision for a verdict.

    Args:
        verdict: Of a token, draft or answer.
        policy: Thresholds of the converge door.
        budget_left: Whether a larger model may still be tried.
    """
    if not objections(verdict, policy or DoorPolicy()):
        return "converge"
    return "escalate" if budget_left else "abort"


def objections(verdict: ReasonVerdict, policy: DoorPolicy) -> list[str]:
    """The reasons against converging, in words; empty if it converges."""
    reasons = []
    if verdict.reason in VETOES[policy.rule]:
        strange = verdict.reason == "out_of_calibration"
        reasons.append(
            "it is unlike what its confidence was calibrated on" if strange else f"its reason is {verdict.reason}"
        )
    if policy.rule == "certificate":
        if not verdict.converged:
            reasons.append("whether it converged is not known" if verdict.converged is None else "it did not converge")
        if verdict.stable != "contract":
            reasons.append(f"its fate is {verdict.stable or 'not known'}")
    elif verdict.confidence is None:
        reasons.append("its confidence is not known")
    elif verdict.confidence < policy.min_confidence:
        reasons.append(f"its confidence is {digits(verdict.confidence)}, under {digits(policy.min_confidence)}")
    if not verdict.proximity < policy.tau_c:
        reasons.append(f"its proximity to collapse is {verdict.proximity:.2f}, not under {policy.tau_c:.2f}")
    if verdict.grounded is None:
        if policy.require_grounding:
            reasons.append("its groundedness is not known")
    elif policy.tau_g is not None and not verdict.grounded > policy.tau_g:
        reasons.append(f"its groundedness is {verdict.grounded:.2f}, not over {policy.tau_g:.2f}")
    return reasons


def digits(share: float) -> str:
    """A share in two digits, or in more where it would round to 1."""
    return next((text for text in (f"{share:.{n}f}" for n in (2, 3, 4)) if float(text) < 1), f"{share:g}")


def explain(verdict: ReasonVerdict, policy: DoorPolicy | None = None, budget_left: bool = True) -> str:
    """The door and why, in one sentence."""
    policy = policy or DoorPolicy()
    opened = door(verdict, policy, budget_left)
    reasons = objections(verdict, policy)
    if not reasons:
        why = "its exit rule was met by itself and its steps contract"
        if policy.rule == "confidence" and verdict.confidence is not None:
            why = f"confidence {digits(verdict.confidence)}"
        return f"converge: {why}, read at {verdict.depth:.2f} loops on average."
    return f"{opened}: {'; '.join(reasons)}."


def mildest(fates: Sequence[Fate | None], patience: int) -> Fate | None:
    """A token's fate: the mildest of its last `patience` loops; None if there are fewer.

    Args:
        fates: Fate of each loop that was run, oldest first.
        patience: Number of loops; `patience_for` gives it for a model with few loops.
    """
    last = [fate for fate in fates if fate is not None][-patience:]
    return None if len(last) < patience else min(last, key=_MILDNESS.index)


def patience_for(policy: DoorPolicy, total_loops: int) -> int:
    """The policy's patience, at most T - 2: the first two loops have no fate."""
    return min(policy.patience, max(1, total_loops - 2))


def of_token(
    reason: Reason | None, depth: int, fate: Fate | None, proximity: float, entropy: float | None = None
) -> ReasonVerdict:
    """A token's verdict; its groundedness is unknown, and its confidence exp(-entropy)."""
    return ReasonVerdict(**part_of(reason, depth, fate, proximity, entropy)._asdict())


def part_of(
    reason: Reason | None, depth: int, fate: Fate | None, proximity: float, entropy: float | None = None
) -> TokenPart:
    """As `of_token`, for `aggregate` alone."""
    converged = None if reason is None else CONVERGED.get(reason)
    return TokenPart(converged, depth, proximity, None, fate, reason, None if entropy is None else math.exp(-entropy))


def aggregate(
    verdicts: Sequence[ReasonVerdict | TokenPart], policy: DoorPolicy | None = None, grounded: float | None = None
) -> ReasonVerdict:
    """The verdict on a draft or an answer, out of those on its tokens (or on an answer, out of its drafts).

    * `stable` is `diverge` if any token diverges; else `spiral` if more than `spiral_share` of the tokens with a fate
      spiral; else `contract`; None only if no token has a fate.
    * `proximity` is the greatest of the parts, `depth` their mean.
    * `grounded` is that of the whole; if not given, the least known one of the parts.
    * `reason` is `divergence` if any token stopped for it; else `collapse` if the proximity reaches `tau_c`; else
      `out_of_calibration` if any part is; else `max_depth` if more than `saturated_share` of the tokens are saturated;
      else `ungrounded` if the groundedness is known and not over `tau_g`; else the commonest reason of the others.
    * `confidence` is the geometric mean of the parts that were read, so exp(-mean entropy) of tokens; None if one is
      unknown.

    Args:
        verdicts: In the order of the text, at least one.
        policy: Shares and thresholds.
        grounded: Groundedness of the whole; None if it was not checked as a whole.

    Raises:
        ValueError: For no verdicts.
    """
    policy = policy or DoorPolicy()
    if not verdicts:
        raise ValueError("an answer without tokens has no verdict")
    proximity = max(verdict.proximity for verdict in verdicts)
    if grounded is None:
        grounded = min((verdict.grounded for verdict in verdicts if verdict.grounded is not None), default=None)
    reason = _reason(verdicts, policy, proximity, grounded)
    return ReasonVerdict(
        converged=None if reason is None else _converged(verdicts, reason),
        depth=sum(verdict.depth for verdict in verdicts) / len(verdicts),
        proximity=proximity,
        grounded=grounded,
        stable=_stable(verdicts, policy),
        reason=reason,
        confidence=_mean_confidence([verdict.confidence for verdict in verdicts if verdict.reason != "forced"]),
    )


def with_confidence(verdict: ReasonVerdict, confidence: float | None, strange: bool) -> ReasonVerdict:
    """The verdict under a calibrated confidence.

    Args:
        verdict: On an answer.
        confidence: Calibrated; None where it is not known.
        strange: Whether the answer is out of calibration. That becomes its reason, unless the text broke off.
    """
    reason = "out_of_calibration" if strange and verdict.reason not in ("collapse", "divergence") else verdict.reason
    return verdict.model_copy(update={"confidence": confidence, "reason": reason})


def _mean_confidence(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    return 0.0 if 0.0 in known else math.exp(sum(map(math.log, known)) / len(known))


def _stable(verdicts: Sequence[ReasonVerdict | TokenPart], policy: DoorPolicy) -> Fate | None:
    fates = [verdict.stable for verdict in verdicts if verdict.stable is not None]
    if not fates:
        return None
    if "diverge" in fates:
        return "diverge"
    return "spiral" if fates.count("spiral") > policy.spiral_share * len(fates) else "contract"


def _reason(
    verdicts: Sequence[ReasonVerdict | TokenPart], policy: DoorPolicy, proximity: float, grounded: float | None
) -> Reason | None:
    # what was fed without a reading says nothing of the model
    reasons: list[Reason | None] = [verdict.reason for verdict in verdicts if verdict.reason != "forced"]
    if not reasons:
        return "forced"
    if "divergence" in reasons:
        return "divergence"
    if proximity >= policy.tau_c or "collapse" in reasons:
        return "collapse"
    # a veto, as the two above are, and `max_depth` is not
    if "out_of_calibration" in reasons:
        return "out_of_calibration"
    if reasons.count("max_depth") > policy.saturated_share * len(reasons):
        return "max_depth"
    loose = grounded is not None and policy.tau_g is not None and grounded <= policy.tau_g
    if loose or (grounded is None and "ungrounded" in reasons):
        return "ungrounded"
    known: list[Reason] = [reason for reason in reasons if reason and reason not in ("max_depth", "ungrounded")]
    return Counter(known).most_common(1)[0][0] if known else None


def _converged(verdicts: Sequence[ReasonVerdict | TokenPart], reason: Reason) -> bool | None:
    """By the reason; where that says nothing of loops, by the tokens."""
    if reason not in ("ungrounded", "out_of_calibration"):
        return CONVERGED.get(reason)
    known = [verdict.converged for verdict in verdicts if verdict.converged is not None]
    return None if not known else sum(known) * 2 > len(known)
