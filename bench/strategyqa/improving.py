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

    def __init__(self, memory: PatternMemory, top_k: int) -> None:
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {top_k}")
        self.memory = memory
        self.top_k = top_k

    def _answered(self, question: Question, ask: Ask) -> Prediction:
        patterns = self.memory.retrieve(question.text, self.top_k)
        assert all(pattern.source != question.qid for pattern in patterns), question.qid
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
        top_k: Patterns that are shown at most.

    Raises:
        ValueError: For a negative `top_k`, or a limit under 1.
    """

    name = "L5"
    learns = True

    def __init__(self, limit: int = LIMIT, top_k: int = TOP_K) -> None:
        super().__init__(PatternMemory(limit), top_k)
        self._waiting: set[str] = set()

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`.

        Raises:
            ValueError: For an item that it has learned from.
        """
        if question.qid in self.memory.seen:
            raise ValueError(f"the memory has learned from {question.qid!r}: score it on other items, or begin anew")
        self._waiting.add(question.qid)
        return self._answered(question, ask)

    def learn(self, item: Item, prediction: Prediction) -> None:
        """See `Level`.

        Raises:
            ValueError: For an item that was not predicted, or was learned from.
        """
        if item.qid not in self._waiting:
            raise ValueError(f"{item.qid!r} was not predicted, or was learned from: predict it first, and learn once")
        assert item.qid not in self.memory.seen, item.qid
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
        top_k: Of them that are shown at most.

    Raises:
        ValueError: For no items, one without a decomposition, or a negative `top_k`.
    """

    name = "L5-icl"

    def __init__(self, items: Sequence[Item], top_k: int = TOP_K) -> None:
        if not items:
            raise ValueError("L5-icl is seeded from items: give it at least one")
        super().__init__(PatternMemory(len(items)), top_k)
        for item in items:
            if not item.decomposition:
                raise ValueError(f"{item.qid!r} has no decomposition: seed from items that have one")
            lesson = f"The answer is {_word(item.answer)}."
            self.memory.add("positive", item.question, item.decomposition, lesson, item.qid, SEED_CONFIDENCE)

    def predict(self, question: Question, ask: Ask) -> Prediction:
        """See `Level`.

        Raises:
            ValueError: For an item that it was seeded from.
        """
        if question.qid in self.memory.seen:
            raise ValueError(f"the level was seeded from {question.qid!r}: score it on other items")
        return self._answered(question, ask)

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
