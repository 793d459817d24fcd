"""What a level did for a question, step by step: for audits, and as a demonstration for a model."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sigma0.bench.strategyqa.level import Prediction
from sigma0.errors import one_line

Function = Literal["decompose", "retrieve", "answer_factual", "evaluate_condition", "combine_facts"]
ActionName = Literal["decompose", "lookup", "evaluate", "finish"]
Value = str | bool | tuple[str | bool, ...] | None
T = TypeVar("T", bound="Trace")

STRICT = ConfigDict(extra="forbid", strict=True)


class Trace:
    """What a level did for a question, as plain JSON values."""

    what: ClassVar[str]  # It is, in words
    steps: tuple[Any, ...]

    @property
    def misses(self) -> list[str]:
        """Why steps failed, in their order."""
        return [step.miss for step in self.steps if step.miss is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(TypeAdapter(type(self)).dump_python(self, mode="json"))

    @classmethod
    def from_dict(cls: type[T], value: Mapping[str, Any]) -> T:
        """A trace out of what its `to_dict` said.

        Raises:
            ValueError: For unknown keys or bad values.
        """
        try:
            return TypeAdapter(cls).validate_json(json.dumps(value))
        except (ValidationError, TypeError) as error:
            raise ValueError(f"no {cls.what}: {one_line(error)[:400]}") from error


@dataclass(frozen=True, config=STRICT)
class TraceStep:
    """A step of a workflow."""

    function: Function  # That was called
    arguments: tuple[Value, ...]  # Of the call, answers put in for `#1`
    result: Value  # That it returned; None where it failed
    purpose: str  # What it was for: the step as the decomposition words it
    miss: str | None = None  # Why there is no result; None where there is one
    uses: tuple[int, ...] = ()  # Numbers of the earlier steps, from 0, whose results the arguments hold

    @property
    def ok(self) -> bool:
        """Whether it has a result."""
        return self.miss is None


@dataclass(frozen=True, config=STRICT)
class WorkflowTrace(Trace):
    """What a workflow did for a question."""

    what = "trace of a workflow"
    qid: str
    question: str
    steps: tuple[TraceStep, ...]
    kind: Literal["workflow"] = "workflow"

    @property
    def answer(self) -> bool | None:
        """The final one; None where there is none."""
        last = self.steps[-1] if self.steps else None
        return last.result if last and last.function == "combine_facts" and isinstance(last.result, bool) else None

    @property
    def pattern(self) -> tuple[Function, ...]:
        """Functions in order; retrieval is left out, for it belongs to the question behind it."""
        return tuple(step.function for step in self.steps if step.function != "retrieve")

    def prediction(self) -> Prediction:
        """The final answer, or the first miss."""
        missed = self.misses[0] if self.misses else None
        return Prediction(None if missed else self.answer, missed, self.to_dict())

    def to_icl_demo(self) -> str:
        """The trace as a doctest, to be shown to a model; retrieval is left out, as whoever completes it has no index.

        Raises:
            ValueError: If it has no answer.
        """
        if self.answer is None or not all(step.ok for step in self.steps):
            raise ValueError(f"the trace of {self.qid!r} has no answer to show: only whole traces demonstrate anything")
        calls = "".join(_call(step) for step in self.steps if step.function != "retrieve")
        return f">>> strategy_qa({_literal(self.question)})\n{calls}Final answer: {words(self.answer)}\n"

    @property
    def grounded(self) -> bool:
        """Whether every condition and the final answer used results of earlier steps that did not fail."""
        return self.answer is not None and all(map(self._grounded, range(len(self.steps))))

    def _grounded(self, number: int) -> bool:
        step = self.steps[number]
        needed = step.function in ("evaluate_condition", "combine_facts")
        found = all(0 <= used < number and self.steps[used].ok for used in step.uses)
        if step.function == "combine_facts" and found:
            found = step.arguments == (tuple(self.steps[used].result for used in step.uses),)
        return found and bool(step.uses or not needed)


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


@dataclass(frozen=True, config=STRICT)
class ReactStep:
    """A thought, an action, and what came of it."""

    thought: str  # As it was written; "" where the step could not be read, like the next two
    action: ActionName | Literal[""]  # That was called
    argument: str  # Of the call, as it was written
    filled: str  # The argument with facts in the place of `#1`
    observation: str  # What the model was told
    miss: str | None = None  # Why the step failed; None where it did not
    uses: tuple[int, ...] = ()  # Numbers of the earlier steps, from 0, whose facts it was shown or was given


@dataclass(frozen=True, config=STRICT)
class ReactTrace(Trace):
    """What a model did for a question, in so many steps at most."""

    what = "trace of thoughts and actions"
    qid: str
    question: str
    steps: tuple[ReactStep, ...]
    limit: int
    kind: Literal["react"] = "react"

    @property
    def answer(self) -> bool | None:
        """What it finished with; None where it did not."""
        last = self.steps[-1] if self.steps else None
        return last.filled.lower() == "yes" if last and last.action == "finish" and last.miss is None else None

    def prediction(self) -> Prediction:
        """The final answer; without one, a miss that counts the steps that failed and tells the last of these."""
        if self.answer is not None:
            return Prediction(self.answer, None, self.to_dict())
        failed = self.misses
        why = f", {len(failed)} failed, the last of them: {failed[-1]}" if failed else ""
        return Prediction(None, f"finish: none within {self.limit} steps{why}", self.to_dict())

    @property
    def grounded(self) -> bool:
        """As of a workflow."""
        return self.answer is not None and self.to_workflow().grounded

    def to_workflow(self) -> WorkflowTrace:
        """The workflow that would have done the same: it splits the question into what was looked up and evaluated.

        Steps that failed are left out: `misses` tells them.

        Raises:
            ValueError: If it did not finish.
        """
        if self.answer is None:
            raise ValueError(f"the trace of {self.qid!r} has no answer: only a finished one is a workflow")
        done = [
            number
            for number, step in enumerate(self.steps)
            if step.action in ("lookup", "evaluate") and step.miss is None
        ]
        # behind the decomposition, which is step 0
        places = {number: place for place, number in enumerate(done, start=1)}
        steps = [_workflow_step(self.steps[number], places) for number in done]
        parts = tuple(step.purpose for step in steps)
        values = tuple(step.result for step in steps if isinstance(step.result, str | bool))
        first = TraceStep("decompose", (self.question,), parts, "steps")
        last = TraceStep("combine_facts", (values,), self.answer, "answer", None, tuple(places.values()))
        return WorkflowTrace(self.qid, self.question, (first, *steps, last))


def _workflow_step(step: ReactStep, places: Mapping[int, int]) -> TraceStep:
    uses = tuple(places[number] for number in step.uses if number in places)
    if step.action == "evaluate":
        return TraceStep("evaluate_condition", (step.filled,), step.observation == "Yes", step.argument, None, uses)
    return TraceStep("answer_factual", (step.filled,), step.observation, step.argument, None, uses)
