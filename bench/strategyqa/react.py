"""L3: the model chooses each step itself, by a thought and an action, and reads what came of it."""

import re
from collections.abc import Sequence
from typing import Literal

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Prediction, Question, read
from sigma0.bench.strategyqa.workflow import (
    LONGEST,
    TraceStep,
    WorkflowTrace,
    combined,
    decompose_prompt,
    fact_prompt,
    fill,
    read_fact,
    read_parts,
    words,
)

ActionName = Literal["decompose", "lookup", "evaluate", "finish"]
# thoughts with their actions at most
STEP_LIMIT = 6
ACTIONS: dict[ActionName, str] = {
    "decompose": "decompose[question] splits it into shorter ones",
    "lookup": "lookup[question] tells a fact",
    "evaluate": "evaluate[question] answers yes or no from the facts so far",
    "finish": "finish[yes] or finish[no] answers the question",
}
_THOUGHT = re.compile(r"Thought:[ \t]*(\S.*)")
_ACTION = re.compile(r"Action:[ \t]*([A-Za-z_]+)[ \t]*\[(.*)\]")


def react(simple: bool, limit: int, question: Question, ask: Ask) -> Prediction:
    """Thinks, acts and reads what came of it, until it finishes; the facts so far are numbered and shown.

    The simple loop has lookup and finish alone; facts stand only where they were read.
    """
    loop = _Loop(simple, question.text, ask)
    for _ in range(limit):
        loop.step()
        if loop.answer is not None:
            break
    trace = WorkflowTrace(question.qid, question.text, loop.steps(), tuple(loop.misses))
    failed = f", {len(loop.misses)} failed, the last of them: {loop.misses[-1]}" if loop.misses else ""
    miss = f"finish: none within {limit} steps{failed}" if loop.answer is None else None
    return Prediction(loop.answer, miss, {"workflow": trace})


class _Loop:
    """One question's way through the loop."""

    def __init__(self, simple: bool, text: str, ask: Ask) -> None:
        self._keeps_facts = not simple
        self._actions: tuple[ActionName, ...] = ("lookup", "finish") if simple else tuple(ACTIONS)
        self._text = text
        self._ask = ask
        self._shown = ""
        # what was looked up and evaluated, and as the model worded it
        self._facts: list[TraceStep] = []
        self._parts: list[str] = []
        self.misses: list[str] = []
        self.answer: bool | None = None

    def steps(self) -> tuple[TraceStep, ...]:
        """Of the workflow that would have done the same: it splits the question into what was looked up and evaluated.

        Without an answer there are none. Steps that failed are left out: `misses` tells them.
        """
        if self.answer is None:
            return ()
        last = combined(self._facts, self.answer, range(1, len(self._facts) + 1))
        return TraceStep("decompose", (self._text,), tuple(self._parts)), *self._facts, last

    def step(self) -> None:
        """Asks for a thought and an action, and does it."""
        obtained = read_step(self._ask("act", self._prompt(), stop=["Observation:"]), self._actions)
        miss: str | None
        if isinstance(obtained, str):
            observation, miss = f"That could not be read: {obtained}.", f"act: {obtained}"
        else:
            thought, action, argument = obtained
            self._shown += f"Thought: {thought}\nAction: {action}[{argument}]\n"
            observation, miss = self._done(action, argument)
        if miss is not None:
            self.misses.append(miss)
        self._shown += f"Observation: {observation or f'That failed: {miss}.'}\n"

    def _done(self, action: ActionName, argument: str) -> tuple[str, str | None]:
        """What came of an action, and why it failed."""
        filled, places = argument, tuple[int, ...]()
        if self._keeps_facts:
            try:
                filled, places = fill(argument, [fact.result for fact in self._facts])
            except ValueError as error:
                return f"That failed: {error}.", f"{action}: {error}"
        if action == "decompose":
            parts, miss = read_parts(self._ask(action, decompose_prompt(filled)))
            return ("" if miss else "; ".join(f"{number}. {part}" for number, part in enumerate(parts, start=1))), miss
        if action == "finish":
            if filled.lower() not in ("yes", "no"):
                return "", f"finish: takes yes or no, not {filled[:60]!r}"
            self.answer = filled.lower() == "yes"
            return "", None
        if action == "lookup":
            fact, miss = read_fact(self._ask(action, fact_prompt(self._text, filled)), action)
            step = TraceStep("answer_factual", (filled,), fact, tuple(place + 1 for place in places))
        else:
            obtained = read(self._ask(action, f"{self._known('Facts')}Question: {filled}\n{FORM}"), action, {})
            miss = obtained.miss
            # it was shown all facts, whether it names them or not
            step = TraceStep("evaluate_condition", (filled,), obtained.answer, tuple(range(1, len(self._facts) + 1)))
        if miss is not None:
            return "", miss
        self._facts.append(step)
        self._parts.append(argument)
        return words(step.result), None

    def _known(self, heading: str) -> str:
        """The facts so far under a heading; "" where there are none."""
        lines = [f"#{n} {fact.arguments[0]} {words(fact.result)}\n" for n, fact in enumerate(self._facts, start=1)]
        return "".join([f"{heading}:\n", *lines]) if lines else ""

    def _prompt(self) -> str:
        offered = "\n".join(f"- {ACTIONS[action]}" for action in self._actions)
        facts = self._known("Facts so far") if self._keeps_facts else ""
        return (
            f"Answer the question step by step. Reply with two lines:\nThought: what to do next\nAction: one of\n"
            f"{offered}\n\nQuestion: {self._text}\n{self._shown}{facts}"
        )


def read_step(text: str, actions: Sequence[ActionName]) -> tuple[str, ActionName, str] | str:
    """A thought, an action and its argument out of a model's words; else what is wrong with them.

    They are one line `Thought: ...` and one line `Action: name[argument]` after it, and nothing else but empty lines.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not (thought := _THOUGHT.fullmatch(lines[0])):
        return f"the first line is no 'Thought: ...' but {(lines or [''])[0][:60]!r}"
    if len(lines) < 2 or not (called := _ACTION.fullmatch(lines[1])):
        return f"the second line is no 'Action: name[argument]' but {(lines[1:] or [''])[0][:60]!r}"
    if len(lines) > 2:
        return f"there is more than one thought and one action: {lines[2][:60]!r}"
    action = next((item for item in actions if item == called.group(1).lower()), None)
    if action is None:
        return f"there is no action {called.group(1)[:60]!r}: take one of {', '.join(actions)}"
    argument = called.group(2).strip()
    if not 1 <= len(argument) <= LONGEST:
        return f"the argument has {len(argument)} characters: give 1 to {LONGEST}"
    return thought.group(1)[:LONGEST], action, argument
