"""A finished continuation: its text, its tokens, what it cost and what is known of it."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from sigma0.signals.grounding.check import Grounding
from sigma0.signals.tokens import Token
from sigma0.signals.verdict import Door, DoorPolicy, ReasonVerdict, door

StopReason = Literal["eos", "stop", "length", "collapse"]
# the fields of a token that need no statistics
_ALWAYS = ("id", "text", "depth", "reason")


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        text: The new text, special tokens left out; where a ladder ran, its final answer.
        tokens: The new tokens, a final EOS included. Where a ladder ran these and all counts are still the model's own,
            of the text of `draft`; the others' are in `above`.
        stop_reason: `eos`, `stop` (a stop string or a caller's criterion), `length`, or `collapse` (ended because the
            text repeated itself).
        mean_depth: Mean exit depth of the tokens after the first; None for a single token.
        depth_saved: Share of loops saved, see `sigma0.signals.savings.Savings`.
        passes_saved: Share of passes saved, see there.
        rows_saved: Share of rows saved, see there.
        total_loops: T.
        prompt_tokens: Ids of the prompt.
        loop_passes: Calls of the shared block after the prompt.
        loop_rows: Rows in those calls.
        prompt_rows: Rows of the prefill.
        head_rows: Rows that the output head read after the prompt.
        verdict: On the whole text; None without `verdict=True`.
        grounding: The claims of the text, looked up in prompt and sources; None without a verdict.
        policy: Thresholds of its door; None without a verdict.
        tokens_forced: New tokens that were fed without a reading, since schema or grammar allowed no other.
        above: The result of a ladder (a `LadderGeneration`); None where no ladder ran.
        draft: What this model itself had written, where a ladder ran; else None.
    """

    text: str
    tokens: tuple[Token, ...]
    stop_reason: StopReason
    mean_depth: float | None
    depth_saved: float | None
    passes_saved: float | None
    rows_saved: float | None
    total_loops: int
    prompt_tokens: int
    loop_passes: int
    loop_rows: int
    prompt_rows: int
    head_rows: int
    verdict: ReasonVerdict | None = None
    grounding: Grounding | None = None
    policy: DoorPolicy | None = None
    tokens_forced: int = 0
    above: Any = None
    draft: "Generation | None" = None

    @property
    def forced_passes_saved(self) -> int:
        """Passes that forced tokens took less than at full depth: T - 1 each, since each still takes one."""
        return self.tokens_forced * (self.total_loops - 1)

    @property
    def answer(self) -> str:
        """The final text, as `text`."""
        return self.text

    @property
    def door(self) -> Door | None:
        """The routing decision: a ladder's where one ran, else the verdict's while budget is left, None without one."""
        if self.above is not None:
            known: Door = self.above.door
            return known
        return None if self.verdict is None else door(self.verdict, self.policy)

    def handed_up(self, above: Any, policy: DoorPolicy) -> "Generation":
        """The same with the answer of a ladder that took over.

        Args:
            above: Its `LadderGeneration`.
            policy: Thresholds of its door.
        """
        final = {name: getattr(above, name) for name in ("text", "stop_reason", "verdict", "grounding")}
        return replace(self, **final, policy=policy, above=above, draft=self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; without a verdict, its fields are left out."""
        values = asdict(replace(self, above=None, draft=None))
        verdict, _, _ = values.pop("verdict"), values.pop("above"), values.pop("draft")
        if self.above is not None:
            values["above"] = self.above.to_dict()
        if self.draft is not None and self.draft.verdict is not None:
            output = {"verdict": self.draft.verdict.to_dict(), "door": self.draft.door}
            values["draft"] = {"text": self.draft.text, "stop_reason": self.draft.stop_reason, **output}
        if verdict is None:
            del values["grounding"], values["policy"]
            values["tokens"] = [{name: token[name] for name in _ALWAYS} for token in values["tokens"]]
            return values
        return {**values, "verdict": verdict.to_dict(), "door": self.door}
