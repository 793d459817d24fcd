"""Whole texts out of drafts or answers that go up."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sigma0.config import ExitConfig, Messages
from sigma0.ladder.answer_unit import Attempt, Climb, Writer, climb
from sigma0.ladder.budget import Budget, BudgetTracker
from sigma0.ladder.results import LadderGeneration, LadderStop, LadderToken, ladder_token
from sigma0.ladder.rungs import AnyRung
from sigma0.ladder.settling import check_settings, final_door, not_tried, versions
from sigma0.ladder.trail import Trail, Unit, open_trail
from sigma0.ladder.triggers import ShutDoor, Trigger
from sigma0.signals.grounding.check import check
from sigma0.signals.verdict import DoorPolicy, aggregate, door, of_token

DRAFT_TOKENS = 32


class Ladder(Protocol):
    """The part of a `FidelityLadder` that texts need."""

    rungs: tuple[AnyRung, ...]
    budget: Budget
    doors: DoorPolicy
    token_doors: DoorPolicy
    policy: Trigger | None

    def policy_for(self, unit: Unit) -> Trigger:
        """The policy in force."""


def write_texts(
    ladder: Ladder,
    prompts: Sequence[str | Messages],
    unit: Unit,
    *,
    max_new_tokens: int = 64,
    draft_tokens: int = DRAFT_TOKENS,
    exit_config: ExitConfig | Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
    sources: Sequence[str] = (),
    warm_start: bool = False,
    written: Attempt | None = None,
    policy: Trigger | None = None,
) -> list[LadderGeneration]:
    """Continues prompts one after the other; one budget for all.

    Args:
        ladder: Rungs, policy and budget.
        prompts: Strings to be continued, or messages; an endpoint gets a string as a message of the user.
        unit: `draft`: a text grows by drafts, each judged and, if the policy fires, written again higher up; `answer`:
            it is judged as a whole. A draft continues the text so far, tokenized again, not its ids: where a tokenizer
            splits it differently, drafts differ from one answer in a single go.
        max_new_tokens: New tokens of each text at most, >= 1; of drafts, as many drafts as that makes.
        draft_tokens: New tokens of each draft at most, >= 1.
        exit_config: For every looped rung; by default each checkpoint's.
        stop: Strings that end a text.
        sources: Texts that an answer may be grounded in, beside the prompt.
        warm_start: Whether a higher rung gets the lower one's text.
        written: Finished answer of the lowest rung; for one prompt and the unit `answer` only.
        policy: Replaces the ladder's.

    Raises:
        ValueError: For no prompts, or bad settings.
    """
    check_settings(max_new_tokens, stop, sources)
    check_settings(draft_tokens, (), ())
    if not prompts:
        raise ValueError("no prompts")
    if written is not None and (unit != "answer" or len(prompts) > 1):
        raise ValueError("a text that is written already is one answer to one prompt")
    config = None if exit_config is None else ExitConfig.parse(exit_config)
    policy, purse = policy or ladder.policy_for(unit), BudgetTracker(ladder.budget)
    rungs = (rung.to_dict() for rung in ladder.rungs)
    doors = ladder.doors if unit == "answer" else ladder.token_doors
    trail = open_trail(unit, rungs, policy, ladder.budget, None, versions(), doors)
    writer = Writer(ladder.rungs, doors, config, stop, purse, trail, ())
    generations = []
    for sequence, prompt in enumerate(prompts):
        writer.context = (*_said(prompt), *sources)
        if unit == "answer":
            units = [climb(writer, policy, prompt, max_new_tokens, sequence, 0, warm_start, written)]
        else:
            units = _drafts(writer, policy, prompt, max_new_tokens, draft_tokens, sequence, warm_start)
        generation = _generation(ladder, unit, units, writer, sequence)
        if generation.door == "escalate" and ladder.policy is None:
            highest = max(climbed.rung for climbed in units if climbed.attempt is not None)
            last = Attempt(generation.text, generation.verdict, None, None, generation.stop_reason)
            whole = hand_up_whole(writer, prompt, last, highest, max_new_tokens, sequence, len(units))
            generation = _generation(ladder, unit, [whole], writer, sequence)
        generations.append(generation)
    return generations


def hand_up_whole(
    writer: Writer,
    prompt: str | Messages,
    text: Attempt,
    rung: int,
    max_new_tokens: int,
    sequence: int,
    position: int,
) -> Climb:
    """Hands up a text whose tokens or drafts were accepted, but whose verdict as a whole may not converge.

    Args:
        writer: Writes and pays, and its doors decide.
        prompt: Of the text.
        text: The text so far.
        rung: The highest rung that wrote a part of it.
        max_new_tokens: New tokens at most.
        sequence: Number of the prompt.
        position: Number of the decision in its text.
    """
    policy = ShutDoor(writer.doors)
    return climb(writer, policy, prompt, max_new_tokens, sequence, position, False, text, rung, whole=True)


def _drafts(
    writer: Writer,
    policy: Trigger,
    prompt: str | Messages,
    max_new_tokens: int,
    draft_tokens: int,
    sequence: int,
    warm_start: bool,
) -> list[Climb]:
    units: list[Climb] = []
    text, left = "", max_new_tokens
    while left > 0:
        here = min(left, draft_tokens)
        unit = climb(writer, policy, _continued(prompt, text), here, sequence, len(units), warm_start, is_draft=True)
        units.append(unit)
        left -= here
        if unit.attempt is None or unit.attempt.stop_reason != "length" or not unit.attempt.text:
            break
        text += unit.attempt.text
    return units


def _continued(prompt: str | Messages, text: str) -> str | Messages:
    """The prompt with the beginning of its answer, whose turn is left open."""
    if not text:
        return prompt
    return prompt + text if isinstance(prompt, str) else [*prompt, {"role": "assistant", "content": text}]


def _said(prompt: str | Messages) -> tuple[str, ...]:
    return (prompt,) if isinstance(prompt, str) else tuple(str(message.get("content", "")) for message in prompt)


def _generation(ladder: Ladder, unit: Unit, units: Sequence[Climb], writer: Writer, sequence: int) -> LadderGeneration:
    names = [rung.name for rung in ladder.rungs]
    written = [(names[climbed.rung], climbed.attempt) for climbed in units if climbed.attempt is not None]
    text = "".join(attempt.text for _, attempt in written)
    grounding = check(text, writer.context)
    verdicts = [attempt.verdict for _, attempt in written] or [of_token(None, 0, None, 0.0)]
    verdict = verdicts[0] if len(verdicts) == 1 else aggregate(verdicts, writer.doors, grounding.score)
    aborted, exhausted = any(climbed.aborted for climbed in units), any(climbed.exhausted for climbed in units)
    highest = max((climbed.rung for climbed in units if climbed.attempt is not None), default=0)
    stop_reason: LadderStop = "budget"
    if written and units[-1].attempt is not None:
        stop_reason = units[-1].attempt.stop_reason
    converges = bool(written) and door(verdict, writer.doors) == "converge"
    part = Trail([writer.trail.lines[0], *writer.trail.decisions_of(sequence)])
    return LadderGeneration(
        text=text,
        unit=unit,
        rung=names[highest],
        tokens=_tokens(units[0], names) if unit == "answer" else (),
        drafts=tuple((name, attempt.text) for name, attempt in written) if unit == "draft" else (),
        verdict=verdict,
        grounding=grounding,
        door=final_door(aborted, converges, exhausted),
        top_rung=exhausted,
        stop_reason=stop_reason,
        not_tried=not_tried(part, names) if aborted else (),
        costs=tuple(writer.costs),
        spent=writer.purse.spent,
        seconds=writer.purse.seconds,
        trail=writer.trail,
    )


def _tokens(unit: Climb, names: Sequence[str]) -> tuple[LadderToken, ...]:
    """The tokens of an answer, if the rung that wrote it returns them."""
    up = "answer" if unit.rung else None
    tokens = () if unit.attempt is None else unit.attempt.tokens
    return tuple(ladder_token(token, names[unit.rung], up) for token in tokens)
