"""A level over items: asked beside each other where it learns nothing, one after the other where it does."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

from sigma0.bench.strategyqa.asking import AnswerCache, Ask, AskSettings
from sigma0.bench.strategyqa.items import Item
from sigma0.bench.strategyqa.level import Level, Prediction, Question
from sigma0.reason.messages import ChatFailed, ChatModel, Usage


@dataclass(frozen=True)
class Answered:
    """What a level made of an item."""

    qid: str  # Of the item
    label: bool  # Its answer
    prediction: Prediction  # The level's
    purposes: tuple[str, ...]  # Of its questions, in their order
    usage: Usage  # Of them all, cached ones as when they were asked
    doors: tuple[str, ...]  # That the verdicts on their answers opened; empty where a model has none

    @property
    def right(self) -> bool:
        """Whether the answer is the label; a miss is wrong."""
        return self.prediction.answer is self.label


@dataclass(frozen=True)
class LevelRun:
    """A level over items, in their order; in words, what it used of labels, and what tells it from its namesakes."""

    level: str
    labels: str
    answered: tuple[Answered, ...]
    variant: str = ""

    @property
    def right(self) -> int:
        """How many are right."""
        return sum(each.right for each in self.answered)

    @property
    def usage(self) -> Usage:
        """Of all."""
        return reduce(Usage.plus, (each.usage for each in self.answered), Usage())

    @property
    def misses(self) -> Counter[str]:
        """Reasons for which there was no answer, by step."""
        told = (each.prediction.miss for each in self.answered)
        return Counter(miss.partition(":")[0] for miss in told if miss is not None)


def run_level(
    level: Level,
    items: Sequence[Item],
    model: ChatModel,
    settings: AskSettings,
    cache: AnswerCache | None = None,
    concurrency: int = 1,
    retries: int = 2,
    advance: Callable[[], None] = lambda: None,
) -> LevelRun:
    """Runs a level over items.

    An item whose question got no answer is begun anew `retries` times before it counts as a miss; a level that learns
    takes one item at a time.

    Raises:
        ValueError: If the level was made from an item that it would be scored on.
    """
    seen = set(level.seeds) & {item.qid for item in items}
    if seen:
        raise ValueError(f"{level.name} was made from {len(seen)} of the items to be scored, such as {min(seen)}")

    def answer(item: Item) -> Answered:
        found = _answer(level, item, Ask(model, settings, cache), retries)
        if level.learn:
            level.learn(item, found.prediction)
        advance()
        return found

    if level.learn or concurrency == 1:
        return LevelRun(level.name, labels_used(level), tuple(answer(item) for item in items))
    with ThreadPoolExecutor(concurrency) as pool:
        return LevelRun(level.name, labels_used(level), tuple(pool.map(answer, items)))


def labels_used(level: Level) -> str:
    """What a level uses of labels, in words."""
    if level.learn:
        return "each item's own, behind its prediction"
    return f"those of {len(level.seeds)} items it was made from" if level.seeds else "none"


def _answer(level: Level, item: Item, ask: Ask, retries: int) -> Answered:
    question = Question(item.qid, item.question)
    prediction = None
    for attempt in range(retries + 1):
        ask.asked.clear()
        try:
            prediction = level.predict(question, ask)
            break
        except ChatFailed as error:
            if attempt == retries:
                prediction = Prediction(None, f"no answer: {error}")
    assert prediction is not None
    usage = reduce(Usage.plus, (each.answer.usage for each in ask.asked), Usage())
    doors = tuple(str(each.answer.door) for each in ask.asked if each.answer.door is not None)
    purposes = tuple(each.purpose for each in ask.asked)
    return Answered(item.qid, item.answer, prediction, purposes, usage, doors)
