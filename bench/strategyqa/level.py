"""What a level of control is: it predicts from the question alone, and may learn once it has been scored."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.items import Item

FORM = "Answer with Yes or No."
# "Yes or no" repeats the form that was asked for, and "no idea" denies that there is an answer: neither is one
_OR = r"[\s,.]{0,3}(?:/|\b(?:or|and)\b)\s{0,3}"
YES_OR_NO = rf"(yes\b(?!{_OR}no\b)|no\b(?!{_OR}yes\b|\s+(?:idea|clue|answer|information|opinion|comment)\b))"
# at the beginning of an answer, or behind the words that a level asks for; nothing else is an answer
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
    found = [line.group(1).strip() for line in lines if line][:most]
    return found if any(map(has_words, found)) else []
