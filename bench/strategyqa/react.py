"""L3: the model chooses each step itself, by a thought and an action, and reads what came of it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, read
from sigma0.bench.strategyqa.traces import ActionName, ReactStep, ReactTrace
from sigma0.bench.strategyqa.workflow import LONGEST, decompose_prompt, fact_prompt, fill, read_fact, read_parts

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


class React(Level):
    """Thinks, acts and reads what came of it, until it finishes; the facts so far are numbered and shown.

    Args:
        limit: Steps at most.
        simple: The same loop with lookup and finish alone; facts stand only where they were read.
    """

    def __init__(self, limit: int = STEP_LIMIT, simple: bool = False) -> None:
        self.name = "L3-simple" if simple else "L3"
        self.limit = limit
        self.keeps_facts = not simple
        self.actions: tuple[ActionName, ...] = ("lookup", "finish") if simple else tuple(ACTIONS)

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        run = _Run(self, question, ask)
        while len(run.steps) < self.limit and not run.finished:
            run.step()
        return ReactTrace(question.qid, question.text, tuple(run.steps), self.limit).prediction()


class _Run:
    """One question's way through the loop."""

    def __init__(self, level: React, question: Question, ask: Ask) -> None:
        self._level = level
        self._question = question
        self._ask = ask
        self.steps: list[ReactStep] = []
        self._acts: dict[str, Callable[[str], tuple[str, str | None]]] = {
            "decompose": self._decompose,
            "lookup": self._lookup,
            "evaluate": self._evaluate,
            "finish": self._finish,
        }

    @property
    def finished(self) -> bool:
        """Whether the last step answered."""
        return bool(self.steps) and self.steps[-1].action == "finish" and self.steps[-1].miss is None

    def step(self) -> None:
        """Asks for a thought and an action, and does it."""
        said = self._ask("act", self._prompt(), stop=["Observation:"])
        found = read_step(said, self._level.actions)
        if isinstance(found, str):
            self.steps.append(ReactStep("", "", "", "", f"That could not be read: {found}.", f"act: {found}"))
            return
        self.steps.append(self._done(found))

    def _done(self, step: ReactStep) -> ReactStep:
        """A step with what came of it."""
        facts = self._facts()
        filled = step.argument
        places: tuple[int, ...] = ()
        if self._level.keeps_facts:
            try:
                filled, places = fill(step.argument, [self.steps[number].observation for number in facts])
            except ValueError as error:
                return replace(step, observation=f"That failed: {error}.", miss=f"{step.action}: {error}")
        # these two were shown all facts, whether they name them or not
        sees_all = step.action in ("evaluate", "finish")
        uses = tuple(facts) if sees_all else tuple(facts[place] for place in places)
        observation, miss = self._acts[step.action](filled)
        return replace(step, filled=filled, observation=observation, miss=miss, uses=uses)

    def _facts(self) -> list[int]:
        """Numbers of the steps that found a fact."""
        return [
            number
            for number, step in enumerate(self.steps)
            if step.action in ("lookup", "evaluate") and step.miss is None
        ]

    def _known(self) -> str:
        found = [self.steps[number] for number in self._facts()]
        lines = (f"#{number} {step.filled} {step.observation}\n" for number, step in enumerate(found, start=1))
        return "".join(lines)

    def _prompt(self) -> str:
        offered = "\n".join(f"- {ACTIONS[action]}" for action in self._level.actions)
        known = self._known() if self._level.keeps_facts else ""
        facts = f"Facts so far:\n{known}" if known else ""
        return (
            f"Answer the question step by step. Reply with two lines:\nThought: what to do next\nAction: one of\n"
            f"{offered}\n\nQuestion: {self._question.text}\n{''.join(map(_shown, self.steps))}{facts}"
        )

    def _decompose(self, argument: str) -> tuple[str, str | None]:
        parts, miss = read_parts(self._ask("decompose", decompose_prompt(argument)))
        if miss is not None:
            return f"That failed: {miss}.", miss
        return "; ".join(f"{number}. {part}" for number, part in enumerate(parts, start=1)), None

    def _lookup(self, argument: str) -> tuple[str, str | None]:
        fact, miss = read_fact(self._ask("lookup", fact_prompt(self._question.text, argument)), "lookup")
        return (f"That failed: {miss}.", miss) if fact is None else (fact, None)

    def _evaluate(self, argument: str) -> tuple[str, str | None]:
        known = self._known()
        facts = f"Facts:\n{known}" if known else ""
        found = read(self._ask("evaluate", f"{facts}Question: {argument}\n{FORM}"), "evaluate", {})
        if found.answer is None:
            return f"That failed: {found.miss}.", found.miss
        return ("Yes" if found.answer else "No"), None

    def _finish(self, argument: str) -> tuple[str, str | None]:
        if argument.lower() in ("yes", "no"):
            return "", None
        miss = f"finish: takes yes or no, not {argument[:60]!r}"
        return f"That failed: {miss}.", miss


def read_step(text: str, actions: Sequence[ActionName]) -> ReactStep | str:
    """A thought and an action out of a model's words, of which nothing came yet; else what is wrong with them.

    They are one line `Thought: ...` and one line `Action: name[argument]` behind it, and nothing else but empty lines.

    Args:
        text: The words.
        actions: That there are.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not (thought := _THOUGHT.fullmatch(lines[0])):
        return f"the first line is no 'Thought: ...' but {(lines or [''])[0][:60]!r}"
    if len(lines) < 2 or not (called := _ACTION.fullmatch(lines[1])):
        return f"the second line is no 'Action: name[argument]' but {(lines[1:] or [''])[0][:60]!r}"
    if len(lines) > 2:
        return f"there is more than one thought and one action: {lines[2][:60]!r}"
    action = next((each for each in actions if each == called.group(1).lower()), None)
    if action is None:
        return f"there is no action {called.group(1)[:60]!r}: take one of {', '.join(actions)}"
    argument = called.group(2).strip()
    if not 1 <= len(argument) <= LONGEST:
        return f"the argument has {len(argument)} characters: give 1 to {LONGEST}"
    return ReactStep(thought.group(1)[:LONGEST], action, argument, "", "")


def _shown(step: ReactStep) -> str:
    said = f"Thought: {step.thought}\nAction: {step.action}[{step.argument}]\n" if step.action else ""
    return f"{said}Observation: {step.observation}\n"
