"""What a level did for a question, call by call: for audits, and as a demonstration for a model."""

import json
from dataclasses import dataclass
from typing import Literal

Function = Literal["decompose", "retrieve", "answer_factual", "evaluate_condition", "combine_facts"]
Value = str | bool | tuple[str | bool, ...] | None


@dataclass(frozen=True)
class TraceStep:
    """A call that returned something."""

    function: Function  # That was called
    arguments: tuple[Value, ...]  # Of the call, answers put in for `#1`
    result: Value  # That it returned
    uses: tuple[int, ...] = ()  # Numbers of the earlier steps, from 0, whose results the arguments hold


@dataclass(frozen=True)
class WorkflowTrace:
    """What a workflow did for a question."""

    qid: str
    question: str
    steps: tuple[TraceStep, ...]
    misses: tuple[str, ...] = ()  # Why other calls failed, in their order

    @property
    def answer(self) -> bool | None:
        """The final one; None where there is none."""
        last = self.steps[-1] if self.steps else None
        return last.result if last and last.function == "combine_facts" and isinstance(last.result, bool) else None

    @property
    def pattern(self) -> tuple[Function, ...]:
        """Functions in order; retrieval is left out, for it belongs to the question behind it."""
        return tuple(step.function for step in self.steps if step.function != "retrieve")

    def to_icl_demo(self) -> str:
        """The trace as a doctest, to be shown to a model; retrieval is left out, as whoever completes it has no index.

        Raises:
            ValueError: If it has no answer.
        """
        if self.answer is None:
            raise ValueError(f"the trace of {self.qid!r} has no answer to show: only whole traces demonstrate anything")
        calls = "".join(_call(step) for step in self.steps if step.function != "retrieve")
        return f">>> strategy_qa({_literal(self.question)})\n{calls}Final answer: {words(self.answer)}\n"

    @property
    def grounded(self) -> bool:
        """Whether every condition and the final answer used results of earlier steps."""
        return self.answer is not None and all(map(self._grounded, range(len(self.steps))))

    def _grounded(self, number: int) -> bool:
        step = self.steps[number]
        found = all(0 <= used < number for used in step.uses)
        if step.function == "combine_facts" and found:
            found = step.arguments == (tuple(self.steps[used].result for used in step.uses),)
        return found and bool(step.uses or step.function not in ("evaluate_condition", "combine_facts"))


def words(value: Value) -> str:
    """A value as it is said: Yes and No for truth values."""
    return ("Yes" if value else "No") if isinstance(value, bool) else str(value)


def _call(step: TraceStep) -> str:
    told = ", ".join(map(_literal, step.arguments))
    return f"Calling {step.function}({told})...\n...{step.function} returned {_literal(step.result)}\n"


def _literal(value: Value) -> str:
    """A value as the demonstration writes it: like Python, with double quotation marks."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
