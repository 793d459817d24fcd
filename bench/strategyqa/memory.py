"""What a level learned from items that it has answered: patterns that worked, and lessons from those that did not."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import log, sqrt
from typing import Literal

from sigma0.bench.strategyqa.adaptive import QuestionType, asked, question_type
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
