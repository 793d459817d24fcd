"""L5: a level that is shown, before it answers, patterns that worked, and lessons of what went wrong before."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import log, sqrt
from typing import Any, Literal

from sigma0.bench.strategyqa.adaptive import QuestionType, asked, question_type
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, listed, numbered, read, start
from sigma0.bench.strategyqa.workflow import words
from sigma0.signals.grounding.words import is_stop, stem, words_of

Kind = Literal["positive", "negative"]
LIMIT = 200
# at which two patterns of a kind and a type are one
SAME = 0.95
# how many uses the confidence that a pattern begins with is worth
PRIOR = 2


@dataclass(frozen=True)
class Pattern:
    """A question that was answered before, and what is to be done or avoided with its like."""

    id: str  # In its memory
    kind: Kind  # Whether it worked
    question_type: QuestionType  # Of the question
    question: str  # Without a story before it
    decomposition: tuple[str, ...]  # The steps that were taken
    lesson: str  # The answer of a positive one; what went wrong with a negative one
    source: str  # Id of the item that it is from
    confidence: float = 0.5  # That it helps, in [0, 1]
    uses: int = 0  # How often it was shown before an item was scored
    successes: int = 0  # How often the prediction was right then


class PatternMemory:
    """Patterns, found by the kind of a question and by its words.

    Attributes:
        seen: Ids of all items whose labels had a part in it, also where their patterns were merged or pruned.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.seen: dict[str, None] = {}
        self._patterns: dict[str, Pattern] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._patterns)

    @property
    def patterns(self) -> Sequence[Pattern]:
        """All, oldest first."""
        return tuple(self._patterns.values())

    def add(
        self,
        kind: Kind,
        text: str,
        decomposition: Iterable[str],
        lesson: str,
        source: str,
        confidence: float = 0.5,
    ) -> Pattern:
        """Keeps a pattern; one that is nearly there already is merged into the older one, which is returned.

        The merged one keeps its words and its counts; the confidences are averaged by what each rests on.
        """
        new = Pattern(
            id=f"p{self._added + 1}",
            kind=kind,
            question_type=question_type(text),
            question=asked(text),
            decomposition=tuple(decomposition),
            lesson=lesson,
            confidence=confidence,
            source=source,
        )
        self._added += 1
        self.seen[source] = None
        twin = self._twin(new)
        if twin is None:
            self._patterns[new.id] = new
            return new
        current = PRIOR + twin.uses
        mean = (current * twin.confidence + PRIOR * new.confidence) / (current + PRIOR)
        self._patterns[twin.id] = replace(twin, confidence=mean)
        return self._patterns[twin.id]

    def retrieve(self, text: str, top_k: int = 3) -> Sequence[Pattern]:
        """The patterns for a question, best first: those of its type, then by likeness times confidence.

        Likeness is the cosine of the words' stems, each weighted by how rare it is among the patterns; ties go to the
        higher confidence, then to the older pattern.
        """
        kind, likenesses = question_type(text), self._likenesses(asked(text))

        def rank(pattern: Pattern) -> tuple[bool, float, float]:
            likeness = likenesses[pattern.id]
            return pattern.question_type != kind, -likeness * pattern.confidence, -pattern.confidence

        return sorted(self._patterns.values(), key=rank)[:top_k]

    def record_use(self, pattern_id: str, success: bool) -> None:
        """Counts a use, and moves the confidence toward its outcome, the less the more uses there were."""
        pattern = self._patterns[pattern_id]
        weight = PRIOR + pattern.uses
        self._patterns[pattern_id] = replace(
            pattern,
            uses=pattern.uses + 1,
            successes=pattern.successes + success,
            confidence=(weight * pattern.confidence + success) / (weight + 1),
        )

    def prune(self) -> Sequence[Pattern]:
        """Drops patterns down to the limit: the least confident first, then the least used, then the oldest."""
        excess = max(0, len(self) - self.limit)
        dropped = sorted(self._patterns.values(), key=lambda item: (item.confidence, item.uses))[:excess]
        for pattern in dropped:
            del self._patterns[pattern.id]
        return dropped

    def __contains__(self, pattern_id: str) -> bool:
        return pattern_id in self._patterns

    def _twin(self, new: Pattern) -> Pattern | None:
        """The pattern that is most like a new one, where it is nearly the same."""
        likenesses, alike = self._likenesses(new.question), (new.kind, new.question_type, new.lesson)
        result = [item for item in self.patterns if (item.kind, item.question_type, item.lesson) == alike]
        twin = max(result, key=lambda item: likenesses[item.id], default=None)
        return twin if twin and likenesses[twin.id] >= SAME else None

    def _likenesses(self, text: str) -> dict[str, float]:
        """Cosines in [0, 1] of a question's words and those of each pattern, by its id.

        A word weighs `log((1 + N) / (1 + n)) + 1`, of N patterns and the n that hold it.
        """
        stems = {item.id: _stems(item.question) for item in self.patterns}
        counts = Counter(chain.from_iterable(stems.values()))

        def weight(words: frozenset[str]) -> float:
            # in one order, so that the sum of floats is the same in every process
            return sum((log((1 + len(self)) / (1 + counts[word])) + 1) ** 2 for word in sorted(words))

        asked_for = _stems(text)
        whole = weight(asked_for)
        return {
            name: weight(asked_for & item) / sqrt(whole * weight(item)) if asked_for & item else 0.0
            for name, item in stems.items()
        }


@lru_cache(maxsize=4 * LIMIT)
def _stems(text: str) -> frozenset[str]:
    return frozenset(stem(word) for word in words_of(text) if not is_stop(word))


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
