"""What a working agent shows its model: bounded, and put together anew for every question."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sigma0.config import Messages
from sigma0.reason.agent.actions import GRAMMAR
from sigma0.reason.agent.work_strategies import WorkStrategy

# parts of a question's characters; what these and the fixed texts leave is for the newest exchanges
TASK_PART = 1 / 5
OPENING_PART = 1 / 4
PLAN_PART = 1 / 10
NOTES_PART = 1 / 12
MIN_CHARS = 8000
CUT = "\n[cut here]"
LEFT_OUT_CHARS = 60
SYSTEM = f"""You repair a repository so that all of its tests pass. You work in steps, one action a step.
{GRAMMAR}
Tests, and files that decide which tests run, are read-only."""
PLANNER = "You plan how to repair a repository so that all of its tests pass. You do not act yet."
ASK_PLAN = "Write the plan: at most eight numbered lines, each of one thing to look at or to change. No code, no JSON."
WARNING = (
    "LAST WARNING: you are stuck. Nothing that you did so far made one more test pass. If this goes on, all edits are "
    "taken back. Until a test more passes, only edit, run_tests, start_over and finish are allowed. Do not repeat an "
    "edit."
)


@dataclass
class AgentContext:
    """What the model knows, as one strategy goes on."""

    task: str  # What is to be done
    strategy: WorkStrategy  # How to go about it
    opening: str  # Shown first: the tests' report, and what the strategy begins with
    max_chars: int  # Of all messages together
    notes: str = ""  # What was tried before, and did not help
    plan: str = ""  # Made for this strategy
    exchanges: list[tuple[str, str]] = field(default_factory=list)  # Replies and what came of them

    def plan_question(self) -> Messages:
        """Asks for a plan."""
        return _messages(PLANNER, f"{self._brief()}\n\n{ASK_PLAN}", [])

    def step_question(self, step: int, max_steps: int, warned: bool) -> Messages:
        """Asks for the next action; the oldest exchanges are left out where all do not fit.

        Args:
            step: From 1.
            max_steps: The last one.
            warned: Whether the last warning stands.
        """
        last = f"Step {step} of {max_steps}." + (f"\n{WARNING}" if warned else "")
        plan = self._part(self.plan.strip(), PLAN_PART)
        brief = self._brief() + (f"\n\nYour plan:\n{plan}" if plan else "")
        room = self.max_chars - len(SYSTEM) - len(brief) - len(last) - LEFT_OUT_CHARS
        kept = _last_that_fit(self.exchanges, room)
        if len(kept) < len(self.exchanges):
            brief += f"\n\n[{len(self.exchanges) - len(kept)} earlier steps are left out]"
        if kept:
            reply, observation = kept[-1]
            kept[-1] = (reply, f"{observation}\n\n{last}")
        else:
            brief += f"\n\n{last}"
        return _messages(SYSTEM, brief, kept)

    def _brief(self) -> str:
        parts = [f"The task:\n{self.task}", f"How to go about it ({self.strategy.name}):\n{self.strategy.instructions}"]
        parts += [self._part(self.notes, NOTES_PART), self._part(self.opening, OPENING_PART)]
        return "\n\n".join(filter(None, parts))

    def _part(self, text: str, part: float) -> str:
        return cut(text, int(self.max_chars * part))


def cut(text: str, max_chars: int) -> str:
    """The text, or its beginning and a mark that it was cut."""
    return text if len(text) <= max_chars else text[: max_chars - len(CUT)] + CUT


def _last_that_fit(exchanges: Sequence[tuple[str, str]], room: int) -> list[tuple[str, str]]:
    """The newest exchanges within some characters, the newest of all cut rather than left out."""
    kept: list[tuple[str, str]] = []
    for reply, observation in reversed(exchanges):
        if len(reply) + len(observation) > room:
            if not kept and room > 4 * len(CUT):
                kept.append((cut(reply, room // 4), cut(observation, room * 3 // 4)))
            break
        room -= len(reply) + len(observation)
        kept.append((reply, observation))
    return kept[::-1]


def _messages(system: str, brief: str, exchanges: Sequence[tuple[str, str]]) -> Messages:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": brief}]
    for reply, observation in exchanges:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": observation}]
    return messages
