"""What one question of the micro-world is, and which split a story belongs to."""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

Split = Literal["train", "calibration", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
DIFFICULTIES = (1, 2, 3, 4, 5, 6)
# Of stories of a few sentences, below the dial.
SHORT = 0

# Shares of all stories, in 256ths, by the first byte of the story's digest.
_TEST_BELOW = 26
_CALIBRATION_BELOW = 52


@dataclass(frozen=True)
class Item:
    """One question about one story, with its known answer."""

    story: str  # The story up to the question, short sentences joined by single spaces
    question: str  # One question, ends in "?"
    answer: str  # The whole answer, a short full sentence
    key: str  # The one word of the answer that the reader had to find
    subject: str  # The word that the question asks about
    # What is met on the way from the question to the answer, a word for each step; the key is last, but for a yes
    # or no, which the last of these words decides. Empty where the way is no single line
    trail: tuple[str, ...]
    family: str  # The kind of question, such as "where"
    hops: int  # How many sentences of the story the answer rests on
    difficulty: int  # The dial from 1 to 6 the story was drawn at (length, distractors, hops), or `SHORT`
    # Worked solution: the sentences it rests on, in the order of the way, then the conclusion
    derivation: tuple[str, ...]
    more: str = ""  # The part of the story that is told after the question before this one
    given: str = ""  # How the answer begins where its beginning is no choice of the reader's

    def __post_init__(self) -> None:
        if self.key not in words_of(self.answer):
            raise ValueError(f"key {self.key!r} is not a word of the answer {self.answer!r}")
        if self.trail and not self.binary and self.trail[-1] != self.key:
            raise ValueError(f"trail {self.trail!r} does not end in the key {self.key!r}")

    @property
    def binary(self) -> bool:
        """Whether the answer is yes or no."""
        return self.key.lower() in ("yes", "no", "true", "false")

    @property
    def prompt(self) -> str:
        """The story and the question as plain text, ready to be continued by a space and the answer."""
        return f"{self.story} {self.question}"

    @property
    def turn(self) -> str:
        """What a user says who has asked about the story before."""
        return f"{self.more} {self.question}" if self.more else self.question


@dataclass(frozen=True)
class Scene:
    """One story and several different questions about it."""

    story: str
    items: tuple[Item, ...]


def split_of(story: str) -> Split:
    """Name the split a story belongs to: about 80 % train, 10 % calibration, 10 % test.

    The split is a function of the story's text alone. So no story can be in two splits, whatever seeds the
    splits were drawn with and however often a generator happens to draw the same story twice.
    """
    byte = blake2b(story.encode(), digest_size=1).digest()[0]
    if byte < _TEST_BELOW:
        return "test"
    return "calibration" if byte < _CALIBRATION_BELOW else "train"


def check_split(split: str) -> Split:
    """Return `split` if it is one of the three, raise ValueError otherwise."""
    for known in SPLITS:
        if split == known:
            return known
    raise ValueError(f"split {split!r} is not one of {SPLITS}")


def words_of(answer: str) -> list[str]:
    """The words of an answer."""
    return re.findall(r"\w+", answer)
