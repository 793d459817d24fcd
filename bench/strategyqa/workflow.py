"""L2: a program holds the steps, and the model is asked for one at a time; what it did is kept as a trace."""

import re
from collections.abc import Sequence

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, has_words, numbered, read, start
from sigma0.bench.strategyqa.retrieval import ParagraphIndex, shown
from sigma0.bench.strategyqa.traces import STRICT, Function, TraceStep, Value, WorkflowTrace, words

# steps of a decomposition at most
MAX_STEPS = 5
# characters of a step, an answer or a passage at most: what stands in the prompts after it
LONGEST = 300
_REFERENCE = re.compile(r"#([0-9]+)")
# how a question of yes or no begins, or the clause of one that follows a condition: "If #1, is ..."
_CONDITION = re.compile(
    r"(?:^|,)\W*(?:is|are|was|were|do|does|did|has|have|had|can|could|would|will|should|must|may|might)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, config=STRICT)
class Template:
    """The steps that a workflow is held to."""

    # Functions in order: `decompose`, then 1 to `MAX_STEPS` of `answer_factual` and `evaluate_condition`, the
    # first of which asks for a fact, then `combine_facts`
    pattern: tuple[Function, ...]
    qids: tuple[str, ...] = ()  # Of the items that it was made from

    @property
    def parts(self) -> tuple[Function, ...]:
        """What becomes of each step of the decomposition."""
        return self.pattern[1:-1]

    @model_validator(mode="after")
    def _check(self) -> "Template":
        if not is_pattern(self.pattern):
            raise ValueError(
                f"a pattern is decompose, answer_factual, at most {MAX_STEPS - 1} more of answer_factual and "
                f"evaluate_condition, and combine_facts, got {', '.join(self.pattern)}"
            )
        return self


def is_pattern(functions: Sequence[Function]) -> bool:
    """Whether a template can hold these."""
    ends = tuple(functions[:2]) == ("decompose", "answer_factual") and functions[-1] == "combine_facts"
    inner = functions[1:-1]
    return ends and set(inner) <= {"answer_factual", "evaluate_condition"} and 1 <= len(inner) <= MAX_STEPS


class Workflow(Level):
    """Has the question split, each step answered, and the answer drawn from these answers, in Python.

    Args:
        template: The steps that it is held to; by default they are as many as the model finds, and one that asks yes or
            no about earlier answers is a condition.
        index: Searched before each question of fact, whose prompt holds the paragraphs; None searches nothing.
    """

    def __init__(self, template: Template | None = None, index: ParagraphIndex | None = None) -> None:
        self.name = "L2" if index is None else "L2-rag"
        self.template = template
        self.index = index

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`."""
        return _Run(self, question, ask).trace().prediction()

    def seeds(self) -> Sequence[str]:
        """The items that its template was made from."""
        return () if self.template is None else self.template.qids


class _Run:
    """One question's way through a workflow; it ends at the first step that fails."""

    def __init__(self, level: Workflow, question: Question, ask: Ask) -> None:
        self._level = level
        self._question = question
        self._ask = ask
        self._steps: list[TraceStep] = []
        # numbers of the steps that hold the answers to #1, #2, ...
        self._answers: list[int] = []

    def trace(self) -> WorkflowTrace:
        """Goes it."""
        template = self._level.template
        parts = self._decompose(template)
        functions = template.parts if template else tuple(map(function_of, parts))
        if parts and all(self._answer(part, function) for part, function in zip(parts, functions, strict=True)):
            self._combine()
        return WorkflowTrace(self._question.qid, self._question.text, tuple(self._steps))

    def _decompose(self, template: Template | None) -> tuple[str, ...]:
        text = self._question.text
        parts, miss = read_parts(self._ask("decompose", decompose_prompt(text, template)), template)
        self._note(TraceStep("decompose", (text,), None if miss else parts, "steps", miss))
        return () if miss else parts

    def _answer(self, part: str, function: Function) -> bool:
        results = [self._steps[number].result for number in self._answers]
        filled, places = fill(part, results)
        uses = tuple(self._answers[place] for place in places)
        if function == "evaluate_condition":
            found = read(self._ask(function, f"{filled}\n{FORM}"), function, {})
            step = TraceStep(function, (filled,), found.answer, part, found.miss, uses)
        else:
            prompt = fact_prompt(self._question.text, filled, self._retrieve(filled, part, uses))
            answer, miss = read_fact(self._ask(function, prompt), function)
            step = TraceStep(function, (filled,), answer, part, miss, uses)
        self._answers.append(len(self._steps))
        return self._note(step)

    def _retrieve(self, query: str, part: str, uses: tuple[int, ...]) -> str:
        if self._level.index is None:
            return ""
        found = self._level.index.search(query)
        self._note(TraceStep("retrieve", (query,), tuple(name for name, _ in found), part, None, uses))
        return shown(found, LONGEST)

    def _combine(self) -> None:
        used = [self._steps[number] for number in self._answers]
        facts = "".join(f"- {step.arguments[0]} {words(step.result)}\n" for step in used)
        asked = f"Facts:\n{facts}Question: {self._question.text}\nGoing by these facts: {FORM}"
        found = read(self._ask("combine_facts", asked), "combine_facts", {})
        values = tuple(step.result for step in used if isinstance(step.result, str | bool))
        self._note(TraceStep("combine_facts", (values,), found.answer, "answer", found.miss, tuple(self._answers)))

    def _note(self, step: TraceStep) -> bool:
        self._steps.append(step)
        return step.ok


def decompose_prompt(text: str, template: Template | None = None) -> str:
    """Asks for the steps of a question."""
    if template is None:
        return (
            f"Question: {text}\nSplit it into at most {MAX_STEPS} short questions, numbered, one a line. Write #1 for "
            "the answer to the first. Do not answer them."
        )
    kinds = {"answer_factual": "a fact", "evaluate_condition": "yes or no about earlier answers"}
    told = " ".join(f"Number {number} asks for {kinds[part]}." for number, part in enumerate(template.parts, start=1))
    return (
        f"Question: {text}\nSplit it into {len(template.parts)} short questions, numbered, one a line. {told} Write #1 "
        "for the answer to the first. Do not answer them."
    )


def fact_prompt(text: str, part: str, passages: str = "") -> str:
    """Asks for a fact that a question needs; passages are lines."""
    known = f"Passages:\n{passages}" if passages else ""
    return f"{known}Question: {text}\nAnswer only this part of it, in a few words: {part}"


def function_of(part: str) -> Function:
    """What a step of a decomposition calls for: a condition asks yes or no about earlier answers."""
    return "evaluate_condition" if _REFERENCE.search(part) and _CONDITION.search(part) else "answer_factual"


def read_parts(text: str, template: Template | None = None) -> tuple[tuple[str, ...], str | None]:
    """The steps out of a model's list, and what is wrong with them; None where nothing is."""
    parts = tuple(numbered(text, len(template.parts) if template else MAX_STEPS))
    if not parts:
        return (), f"decompose: no numbered steps in {start(text)}"
    if template and len(parts) < len(template.parts):
        return parts, f"decompose: {len(parts)} steps where the template has {len(template.parts)}"
    return parts, check_parts(parts)


def check_parts(parts: Sequence[str]) -> str | None:
    """What is wrong with the steps of a decomposition; None where nothing is."""
    for number, part in enumerate(parts, start=1):
        if len(part) > LONGEST:
            return f"decompose: step {number} is longer than {LONGEST} characters"
        late = [found for found in _REFERENCE.findall(part) if not 1 <= int(found) < number]
        if late:
            return f"decompose: step {number} refers to #{late[0]}, which is not answered by then"
    return None


def read_fact(text: str, step: str) -> tuple[str | None, str | None]:
    """The first line of a model's words, and what is wrong with it; None where nothing is."""
    fact = next((" ".join(line.split()) for line in text.splitlines() if has_words(line)), "")
    return (fact[:LONGEST].removesuffix("."), None) if fact else (None, f"{step}: no words in {start(text)}")


def fill(part: str, results: Sequence[Value]) -> tuple[str, tuple[int, ...]]:
    """Puts answers in for `#1`, `#2`, ...

    Returns:
        The text, and the places of the answers in it, from 0.

    Raises:
        ValueError: For a number that no answer has.
    """
    numbers = sorted({int(found) for found in _REFERENCE.findall(part)})
    for number in numbers:
        if not 1 <= number <= len(results):
            raise ValueError(f"#{number} has no answer yet: there are {len(results)}")
    filled = _REFERENCE.sub(lambda found: words(results[int(found.group(1)) - 1]), part)
    return filled, tuple(number - 1 for number in numbers)
