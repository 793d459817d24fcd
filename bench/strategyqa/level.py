"""What a level of control is: it predicts from the question alone, and may learn once it has been scored.

It goes over items: asked beside each other where it learns nothing, one after the other where it does.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from sigma0.bench.strategyqa.asking import AnswerCache, Ask, AskSettings
from sigma0.bench.strategyqa.items import Item
from sigma0.reason.messages import ChatFailed, ChatModel, Usage

FORM = "Answer with Yes or No."
# "Yes or no" repeats the form that was asked for, and "no idea" denies that there is an answer: neither is one
_OR = r"[\s,.]{0,3}(?:/|\b(?:or|and)\b)\s{0,3}"
YES_OR_NO = rf"(yes\b(?!{_OR}no\b)|no\b(?!{_OR}yes\b|\s+(?:idea|clue|answer|information|opinion|comment)\b))"
# at the beginning of an answer, or after the words that a level asks for; nothing else is an answer
_LABELLED = re.compile(rf"\banswer\s*(?:is|:)\s*\**{YES_OR_NO}", re.IGNORECASE)
_FIRST = re.compile(rf"^\W*{YES_OR_NO}", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """What a level sees of an item: its id and its question, no label, no facts, no decomposition."""

    qid: str
    text: str


@dataclass(frozen=True)
class Prediction:
    """What a level makes of a question."""

    answer: bool | None  # None is a miss: no answer could be read, which counts as wrong and never as No
    miss: str | None = None  # Why there is none; None where there is one
    trace: dict[str, Any] = field(default_factory=dict)  # What the level did: for audits, and for distillation

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.miss is None):
            raise ValueError(f"an answer or the reason why there is none, got {self.answer!r} and {self.miss!r}")


@dataclass
class Level:
    """A level of control; one that learns goes through items one by one."""

    name: str  # In the registry
    predict: Callable[[Question, Ask], Prediction]
    seeds: tuple[str, ...] = ()  # Ids of the items that it was made from: it is never scored on them
    # Is shown the label of an item, after the prediction for it was made; None learns nothing
    learn: Callable[[Item, Prediction], None] | None = None


def read_answer(text: str) -> bool | None:
    """Yes or no out of a model's words: the last "answer is yes", else a yes or no that they begin with; else None."""
    labelled = _LABELLED.findall(text)
    if labelled:
        return bool(labelled[-1].lower() == "yes")
    first = _FIRST.match(text)
    return None if first is None else first.group(1).lower() == "yes"


def read(text: str, step: str, trace: dict[str, Any]) -> Prediction:
    """A prediction out of a model's words."""
    answer = read_answer(text)
    if answer is None:
        return Prediction(None, f"{step}: no yes or no in {start(text)}", trace)
    return Prediction(answer, None, trace)


def start(text: str) -> str:
    """How a text begins, in quotation marks: for the reason of a miss."""
    return repr(" ".join(text.split())[:60])


def has_words(text: str) -> bool:
    """Whether a text holds a letter or a digit: marks and pictures alone say nothing."""
    return re.search(r"[^\W_]", text) is not None


def listed(entries: Iterable[str]) -> str:
    """A numbered list, one entry a line."""
    return "\n".join(f"{number}. {entry}" for number, entry in enumerate(entries, start=1))


def numbered(text: str, most: int) -> Sequence[str]:
    """The entries of a numbered or bulleted list, one a line, at most `most`; without any word in them it is none."""
    lines = (re.fullmatch(r"\s*(?:\d+[.):]|[-*])\s*(\S.*)", line) for line in text.splitlines())
    result = [line.group(1).strip() for line in lines if line][:most]
    return result if any(map(has_words, result)) else []


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
        return sum(element.right for element in self.answered)

    @property
    def usage(self) -> Usage:
        """Of all."""
        return reduce(Usage.plus, (element.usage for element in self.answered), Usage())

    @property
    def misses(self) -> Counter[str]:
        """Reasons for which there was no answer, by step."""
        output = (element.prediction.miss for element in self.answered)
        return Counter(miss.partition(":")[0] for miss in output if miss is not None)


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
    """
    seen = set(level.seeds) & {item.qid for item in items}
    if seen:
        raise ValueError(f"{level.name} was made from {len(seen)} of the items to be scored, such as {min(seen)}")

    def answer(item: Item) -> Answered:
        result = _answer(level, item, Ask(model, settings, cache), retries)
        if level.learn:
            level.learn(item, result.prediction)
        advance()
        return result

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
    usage = reduce(Usage.plus, (element.answer.usage for element in ask.asked), Usage())
    doors = tuple(str(element.answer.door) for element in ask.asked if element.answer.door is not None)
    purposes = tuple(element.purpose for element in ask.asked)
    return Answered(item.qid, item.answer, prediction, purposes, usage, doors)
