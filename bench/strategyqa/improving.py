"""L5: a level that is shown, before it answers, what worked and what went wrong on items that it answered before."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, listed, numbered, read, start
from sigma0.bench.strategyqa.memory import LIMIT, Kind, Pattern, PatternMemory
from sigma0.bench.strategyqa.workflow import words

MAX_STEPS = 4
TOP_K = 3
# of a question, a step or a lesson as it is shown
MAX_LENGTH = 300
SEED_CONFIDENCE = 0.8


def predict(memory: PatternMemory, question: Question, ask: Ask) -> Prediction:
    """Splits a question and answers it, both with patterns in the prompt."""
    if question.qid in memory.seen:
        raise ValueError(f"the memory holds what was learned from {question.qid!r}: score it on other items")
    patterns = memory.retrieve(question.text, TOP_K)
    # the best last, next to the question
    shown = "".join(f"{_shown(pattern)}\n\n" for pattern in reversed(patterns))
    trace: dict[str, Any] = {"patterns": [pattern.id for pattern in patterns]}
    said = ask(
        "decompose",
        f"{shown}Question: {question.text}\nDo not answer it yet. Write a numbered list of 2 to {MAX_STEPS} short "
        "questions that lead to the answer. #1 stands for the answer to the first.",
    )
    steps = [step[:MAX_LENGTH] for step in numbered(said, MAX_STEPS)]
    if not steps:
        return Prediction(None, f"decompose: no numbered question in {start(said)}", trace)
    trace["steps"] = steps
    asked = f"{shown}Question: {question.text}\nSteps:\n{listed(steps)}\nAnswer the steps in your mind. {FORM}"
    said = ask("answer", asked)
    return read(said, "answer", {**trace, "reasoning": said})


class Improving(Level):
    """L5: learns from each item once it was scored: what worked where it was right, what went wrong where it was not.

    It is prequential by construction: an item whose label had a part in the memory is refused, and what was not
    predicted is not learned from.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__("L5", self._predict, learn=self._learn)
        self.memory = PatternMemory(limit)
        self._waiting: set[str] = set()

    def _predict(self, question: Question, ask: Ask) -> Prediction:
        self._waiting.add(question.qid)
        return predict(self.memory, question, ask)

    def _learn(self, item: Item, prediction: Prediction) -> None:
        """Raises ValueError for an item that was not predicted, or was learned from."""
        if item.qid not in self._waiting:
            raise ValueError(f"{item.qid!r} was not predicted, or was learned from: predict it first, and learn once")
        self._waiting.remove(item.qid)
        right = prediction.answer == item.answer
        for pattern_id in prediction.trace.get("patterns", ()):
            if pattern_id in self.memory:
                self.memory.record_use(pattern_id, right)
        label = words(item.answer)
        lesson = f"The answer is {label}."
        if prediction.miss is not None:
            lesson = f"No answer could be read ({prediction.miss[:MAX_LENGTH]}); the answer is {label}."
        elif not right:
            lesson = f"These steps led to {words(not item.answer)}, which is wrong; the answer is {label}."
        kind: Kind = "positive" if right else "negative"
        self.memory.add(kind, item.question, prediction.trace.get("steps", ()), lesson, item.qid)
        self.memory.prune()


def seeded(items: Sequence[Item]) -> Level:
    """L5-icl: is shown training items with their steps and answers, and learns nothing after that."""
    memory = PatternMemory(len(items))
    for item in items:
        if not item.decomposition:
            raise ValueError(f"{item.qid!r} has no decomposition: seed from items that have one")
        lesson = f"The answer is {words(item.answer)}."
        memory.add("positive", item.question, item.decomposition, lesson, item.qid, SEED_CONFIDENCE)
    return Level("L5-icl", partial(predict, memory), tuple(memory.seen))


def _shown(pattern: Pattern) -> str:
    steps = listed(step[:MAX_LENGTH] for step in pattern.decomposition)
    head = "A question that was answered well" if pattern.kind == "positive" else "A question that went wrong"
    return "\n".join(part for part in (f"{head}: {pattern.question[:MAX_LENGTH]}", steps, pattern.lesson) if part)
