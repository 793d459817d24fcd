"""L5: a level that is shown, before it answers, what worked and what went wrong on items that it answered before."""

from collections.abc import Sequence
from typing import Any

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, listed, numbered, read, start
from sigma0.bench.strategyqa.memory import LIMIT, Pattern, PatternMemory

MAX_STEPS = 4
TOP_K = 3
# of a question, a step or a lesson as it is shown
MAX_LENGTH = 300
SEED_CONFIDENCE = 0.8


class _WithMemory(Level):
    """Splits a question and answers it, both with patterns in the prompt."""

    def __init__(self, memory: PatternMemory) -> None:
        self.memory = memory

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`.

        Raises:
            ValueError: For an item whose label had a part in the memory.
        """
        if question.qid in self.memory.seen:
            raise ValueError(f"the memory holds what was learned from {question.qid!r}: score it on other items")
        patterns = self.memory.retrieve(question.text, TOP_K)
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


class Improving(_WithMemory):
    """Learns from each item once it was scored: what worked after a right prediction, what went wrong after another.

    It is prequential by construction: an item whose label had a part in the memory is refused, and what was not
    predicted is not learned from.

    Args:
        limit: Patterns that it keeps at most.
    """

    name = "L5"
    learns = True

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__(PatternMemory(limit))
        self._waiting: set[str] = set()

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`; raises as the class above."""
        self._waiting.add(question.qid)
        return super().predict(question, ask)

    def learn(self, item: Item, prediction: Prediction) -> None:
        """See `Level`.

        Raises:
            ValueError: For an item that was not predicted, or was learned from.
        """
        if item.qid not in self._waiting:
            raise ValueError(f"{item.qid!r} was not predicted, or was learned from: predict it first, and learn once")
        self._waiting.remove(item.qid)
        right = prediction.answer == item.answer
        for pattern_id in prediction.trace.get("patterns", ()):
            if pattern_id in self.memory:
                self.memory.record_use(pattern_id, right)
        steps = prediction.trace.get("steps", ())
        self.memory.add(
            "positive" if right else "negative",
            item.question,
            steps,
            f"The answer is {_word(item.answer)}." if right else what_went_wrong(item, prediction),
            item.qid,
        )
        self.memory.prune()


class Seeded(_WithMemory):
    """Is shown training items with their steps and answers, and learns nothing after that.

    Args:
        items: With decompositions; the memory is made of them.

    Raises:
        ValueError: For one without a decomposition.
    """

    name = "L5-icl"

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(PatternMemory(len(items)))
        for item in items:
            if not item.decomposition:
                raise ValueError(f"{item.qid!r} has no decomposition: seed from items that have one")
            lesson = f"The answer is {_word(item.answer)}."
            self.memory.add("positive", item.question, item.decomposition, lesson, item.qid, SEED_CONFIDENCE)

    def seeds(self) -> Sequence[str]:
        """Ids of the items that it was seeded from."""
        return tuple(self.memory.seen)


def what_went_wrong(item: Item, prediction: Prediction) -> str:
    """A sentence on a prediction that was wrong, from the label and what the level did itself."""
    if prediction.miss is not None:
        return f"No answer could be read ({prediction.miss[:MAX_LENGTH]}); the answer is {_word(item.answer)}."
    return f"These steps led to {_word(not item.answer)}, which is wrong; the answer is {_word(item.answer)}."


def _shown(pattern: Pattern) -> str:
    steps = listed(step[:MAX_LENGTH] for step in pattern.decomposition)
    head = "A question that was answered well" if pattern.kind == "positive" else "A question that went wrong"
    return "\n".join(part for part in (f"{head}: {pattern.question[:MAX_LENGTH]}", steps, pattern.lesson) if part)


def _word(answer: bool) -> str:
    return "Yes" if answer else "No"
