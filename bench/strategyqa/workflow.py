"""L2: a program holds the steps, and the model is asked for one at a time; L3: the model chooses each step itself.

What it did is kept as a trace. L2-rag searches paragraphs by TF-IDF; L3 thinks, acts, and reads what came of it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass as checked

from sigma0.bench.core.conditions import Strict
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item, read_json
from sigma0.bench.strategyqa.level import FORM, Prediction, Question, has_words, numbered, read, start
from sigma0.errors import needs_extra

TOP_K = 3


class Paragraph(Strict, strict=True):
    """A paragraph of an article, in the form of the published file."""

    title: str
    section: str | None = None
    headers: Any = None
    para_index: int = 0
    content: str


_PARAGRAPHS = TypeAdapter(dict[str, Paragraph])


class ParagraphIndex:
    """TF-IDF over paragraphs, in memory."""

    def __init__(self, paragraphs: dict[str, Paragraph]) -> None:
        with needs_extra("bench"):
            from sklearn.feature_extraction.text import TfidfVectorizer
        self._paragraphs = list(paragraphs.items())
        # logarithmic counts, so that a long paragraph does not win by repeating a word
        self._vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float64)
        try:
            self._matrix = self._vectorizer.fit_transform(
                f"{entry.title}\n{entry.content}" for entry in paragraphs.values()
            )
        except ValueError as error:
            raise ValueError(f"{len(paragraphs)} paragraphs hold no words to search for: {error}") from error

    def search(self, query: str) -> list[tuple[str, Paragraph]]:
        """The paragraphs that share most words with a query and their ids, best first, at most `TOP_K`; ties as in the
        file.
        """
        scores = (self._matrix @ self._vectorizer.transform([query]).T).toarray().ravel()
        best = np.argsort(-scores, kind="stable")[:TOP_K].tolist()
        return [self._paragraphs[row] for row in best if scores[row] > 0]


def load_paragraphs(path: Path) -> dict[str, Paragraph]:
    """The paragraphs of the published file, by id."""
    return read_json(path, _PARAGRAPHS, "paragraph file")


def fact_paragraphs(items: Sequence[Item]) -> dict[str, Paragraph]:
    """The facts of items as paragraphs, for where no paragraph file is at hand.

    A level that searches the facts of the very items that it is asked has been given what their answers rest on.
    """
    return {
        f"{item.qid}-{number}": Paragraph(title=item.term, para_index=number, content=fact)
        for item in items
        for number, fact in enumerate(item.facts)
    }


def shown(obtained: Sequence[tuple[str, Paragraph]], longest: int) -> str:
    """Paragraphs as lines of a prompt, the text of each cut after `longest` characters."""
    return "".join(f"- {entry.title}: {' '.join(entry.content.split())[:longest]}\n" for _, entry in obtained)


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
        """Functions in order; retrieval is left out, for it belongs to the question after it."""
        return tuple(step.function for step in self.steps if step.function != "retrieve")

    def to_icl_demo(self) -> str:
        """The trace as a doctest, to be shown to a model; without retrieval, as whoever completes it has no index."""
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
        obtained = all(0 <= used < number for used in step.uses)
        if step.function == "combine_facts" and obtained:
            obtained = step.arguments == (tuple(self.steps[used].result for used in step.uses),)
        return obtained and bool(step.uses or step.function not in ("evaluate_condition", "combine_facts"))


def words(value: Value) -> str:
    """A value as it is said: Yes and No for truth values."""
    return ("Yes" if value else "No") if isinstance(value, bool) else str(value)


def _call(step: TraceStep) -> str:
    output = ", ".join(map(_literal, step.arguments))
    return f"Calling {step.function}({output})...\n...{step.function} returned {_literal(step.result)}\n"


def _literal(value: Value) -> str:
    """A value as the demonstration writes it: like Python, with double quotation marks."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


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


@checked(frozen=True, config=ConfigDict(extra="forbid", strict=True))
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


def workflow(template: Template | None, index: ParagraphIndex | None, question: Question, ask: Ask) -> Prediction:
    """Has the question split, each step answered, and the answer drawn from these answers; ends where a step fails.

    Without a template the steps are as many as the model finds, and one that asks yes or no about earlier answers is a
    condition. An index is searched before each question of fact, whose prompt holds the paragraphs.
    """
    text = question.text
    steps: list[TraceStep] = []
    # numbers of the steps that hold the answers to #1, #2, ...
    answers: list[int] = []

    def ended(miss: str | None) -> Prediction:
        trace = WorkflowTrace(question.qid, text, tuple(steps), () if miss is None else (miss,))
        return Prediction(trace.answer, miss, {"workflow": trace})

    parts, miss = read_parts(ask("decompose", decompose_prompt(text, template)), template)
    if miss is not None:
        return ended(miss)
    steps.append(TraceStep("decompose", (text,), parts))
    functions = template.parts if template else tuple(map(function_of, parts))
    for part, function in zip(parts, functions, strict=True):
        filled, places = fill(part, [steps[number].result for number in answers])
        uses = tuple(answers[place] for place in places)
        result: Value
        if function == "evaluate_condition":
            obtained = read(ask(function, f"{filled}\n{FORM}"), function, {})
            result, miss = obtained.answer, obtained.miss
        else:
            passages = [] if index is None else index.search(filled)
            if index is not None:
                steps.append(TraceStep("retrieve", (filled,), tuple(name for name, _ in passages), uses))
            result, miss = read_fact(ask(function, fact_prompt(text, filled, shown(passages, LONGEST))), function)
        if miss is not None:
            return ended(miss)
        answers.append(len(steps))
        steps.append(TraceStep(function, (filled,), result, uses))
    used = [steps[number] for number in answers]
    facts = "".join(f"- {step.arguments[0]} {words(step.result)}\n" for step in used)
    asked = f"Facts:\n{facts}Question: {text}\nGoing by these facts: {FORM}"
    obtained = read(ask("combine_facts", asked), "combine_facts", {})
    if obtained.answer is not None:
        steps.append(combined(used, obtained.answer, answers))
    return ended(obtained.miss)


def combined(facts: Sequence[TraceStep], answer: bool, uses: Sequence[int]) -> TraceStep:
    """The last step: facts, whose numbers `uses` holds, to an answer."""
    values = tuple(step.result for step in facts if isinstance(step.result, str | bool))
    return TraceStep("combine_facts", (values,), answer, tuple(uses))


def decompose_prompt(text: str, template: Template | None = None) -> str:
    """Asks for the steps of a question."""
    if template is None:
        return (
            f"Question: {text}\nSplit it into at most {MAX_STEPS} short questions, numbered, one a line. Write #1 for "
            "the answer to the first. Do not answer them."
        )
    kinds = {"answer_factual": "a fact", "evaluate_condition": "yes or no about earlier answers"}
    output = " ".join(f"Number {number} asks for {kinds[part]}." for number, part in enumerate(template.parts, start=1))
    return (
        f"Question: {text}\nSplit it into {len(template.parts)} short questions, numbered, one a line. {output} "
        "Write #1 for the answer to the first. Do not answer them."
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
        late = [obtained for obtained in _REFERENCE.findall(part) if not 1 <= int(obtained) < number]
        if late:
            return f"decompose: step {number} refers to #{late[0]}, which is not answered by then"
    return None


def read_fact(text: str, step: str) -> tuple[str | None, str | None]:
    """The first line of a model's words, and what is wrong with it; None where nothing is."""
    fact = next((" ".join(line.split()) for line in text.splitlines() if has_words(line)), "")
    return (fact[:LONGEST].removesuffix("."), None) if fact else (None, f"{step}: no words in {start(text)}")


def fill(part: str, results: Sequence[Value]) -> tuple[str, tuple[int, ...]]:
    """Puts answers in for `#1`, `#2`, ...; the text, and the places of the answers in it, from 0."""
    numbers = sorted({int(obtained) for obtained in _REFERENCE.findall(part)})
    for number in numbers:
        if not 1 <= number <= len(results):
            raise ValueError(f"#{number} has no answer yet: there are {len(results)}")
    filled = _REFERENCE.sub(lambda obtained: words(results[int(obtained.group(1)) - 1]), part)
    return filled, tuple(number - 1 for number in numbers)


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
