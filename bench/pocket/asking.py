"""What a kind of story hands over: sentences, and questions with the sentences that prove their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from sigma0.bench.pocket.items import Item, Scene


@dataclass(frozen=True)
class Asked:
    """A question about a story, see `Item`; `proof` holds the indices of the sentences that the answer rests on."""

    family: str
    question: str
    answer: str
    key: str
    subject: str
    trail: tuple[str, ...]
    proof: tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """A story as sentences, and a maker of random questions about it: ask(rng, share of yes or no)."""

    sentences: tuple[str, ...]
    ask: Callable[[Random, float], Asked]


def scene(rng: Random, told: Told, difficulty: int, questions: int, binary: float) -> Scene:
    """Ask up to `questions` questions about different subjects, the ones that need most sentences first.

    An answer given is one more fact in the text. In this order no later answer can be found by following an earlier
    one forwards; read backwards, from a thing to what lies in it, it may still shorten the way.

    Args:
        rng: Source of every choice.
        told: The story.
        difficulty: The dial it was told at, from 1 to 6.
        questions: The most items to return; small stories have fewer.
        binary: Share of questions that are answered by yes or no.
    """
    story = " ".join(told.sentences)
    found: dict[str, Asked] = {}
    for _ in range(4 * questions):
        if len(found) == questions:
            break
        asked = told.ask(rng, binary)
        found.setdefault(asked.subject, asked)
    ordered = sorted(found.values(), key=lambda asked: -len(asked.proof))
    return Scene(story, tuple(_item(told.sentences, story, asked, difficulty) for asked in ordered))


def yes_or_no(truth: bool, statement: str, denial: str | None = None) -> tuple[str, str]:
    """An answer that opens with yes or no and goes on with a full statement, and its key.

    Args:
        truth: Whether the answer is yes.
        statement: What holds if it is, and also if it is not where there is no `denial`.
        denial: What holds if it is not.
    """
    text = statement if truth or denial is None else denial
    lowered = text[0].lower() + text[1:] if text.startswith("The ") else text
    return (f"Yes, {lowered}", "Yes") if truth else (f"No, {lowered}", "No")


def _item(sentences: Sequence[str], story: str, asked: Asked, difficulty: int) -> Item:
    conclusion = asked.answer
    if conclusion.startswith(("The ", "Yes", "No,")):
        conclusion = conclusion[0].lower() + conclusion[1:]
    return Item(
        story=story,
        question=asked.question,
        answer=asked.answer,
        key=asked.key,
        subject=asked.subject,
        trail=asked.trail,
        family=asked.family,
        hops=len(asked.proof),
        difficulty=difficulty,
        derivation=(*(sentences[index] for index in asked.proof), f"So {conclusion}"),
    )
