"""What a model did that chose its own steps, and the workflow that would have done the same."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from sigma0.bench.strategyqa.level import Prediction
from sigma0.bench.strategyqa.traces import STRICT, Trace, TraceStep, WorkflowTrace

ActionName = Literal["decompose", "lookup", "evaluate", "finish"]


@dataclass(frozen=True, config=STRICT)
class ReactStep:
    """A thought, an action, and what came of it.

    Attributes:
        thought: As it was written; "" where the step could not be read, like the next two.
        action: That was called.
        argument: Of the call, as it was written.
        filled: The argument with facts in the place of `#1`.
        observation: What the model was told.
        miss: Why the step failed; None where it did not.
        uses: Numbers of the earlier steps, from 0, whose facts it was shown or was given.
    """

    thought: str
    action: ActionName | Literal[""]
    argument: str
    filled: str
    observation: str
    miss: str | None = None
    uses: tuple[int, ...] = ()


@dataclass(frozen=True, config=STRICT)
class ReactTrace(Trace):
    """What a model did for a question.

    Attributes:
        qid: Of the question.
        question: It.
        steps: In order.
        limit: Steps that it had.
        kind: Tells this trace from others.
    """

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
        failed = [step.miss for step in self.steps if step.miss is not None]
        why = f", {len(failed)} failed, the last of them: {failed[-1]}" if failed else ""
        return Prediction(None, f"finish: none within {self.limit} steps{why}", self.to_dict())

    def get_audit_info(self) -> dict[str, Any]:
        """As of a workflow; `calls` are by action, and those of steps that could not be read stand under ""."""
        made = self.to_workflow().get_audit_info() if self.answer is not None else {"grounded": False, "used": []}
        return {
            "steps": len(self.steps),
            "calls": dict(Counter(step.action for step in self.steps)),
            "misses": [step.miss for step in self.steps if step.miss is not None],
            "grounded": made["grounded"],
            "used": made["used"],
        }

    def to_workflow(self) -> WorkflowTrace:
        """The workflow that would have done the same: it splits the question into what was looked up and evaluated.

        Steps that failed are left out: ask `get_audit_info` for them.

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
