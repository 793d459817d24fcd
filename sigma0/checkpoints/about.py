"""What a checkpoint says of itself in `about.json`: what the model knows, prompts that it answers, words it has seen.

The file is optional and lies beside `config.json`. Published checkpoints have none.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sigma0.errors import one_line

FILE = "about.json"
# How a model can be asked by outer loops (`sigma0.reason.forms`).
Form = Literal["answer", "look", "check", "plan", "act"]
_WORD = re.compile(r"[^\W\d_]+|\d+")
# how many unseen words a note quotes, and how much of each
_QUOTED, _LONGEST = 3, 20


class Example(BaseModel):
    """A prompt that the model answers, and its answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    answer: str


class About(BaseModel):
    """The content of `about.json`.

    Attributes:
        knows: What the model knows, so that "NAME knows ..." is a sentence.
        examples: Prompts that it answers.
        words: All words and numbers of its training text, as written there; empty where they are too many to list.
        is_chat: Whether its examples are messages of a chat, and no texts to continue.
        forms: In which outer loops may ask it; empty for a model that was taught none of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    knows: str
    examples: tuple[Example, ...] = ()
    words: tuple[str, ...] = ()
    is_chat: bool = False
    forms: tuple[Form, ...] = ()

    def unseen(self, text: str) -> list[str]:
        """The words of a text that the training text did not have, each once, in order."""
        seen = frozenset(self.words)
        return list(dict.fromkeys(word for word in split_words(text) if word not in seen)) if seen else []


def split_words(text: str) -> list[str]:
    """The words and numbers of a text, as written."""
    return _WORD.findall(text)


def read_about(folder: str | Path) -> About | None:
    """Reads a checkpoint's `about.json`.

    Args:
        folder: The checkpoint's folder; a hub id has no such file.

    Returns:
        None where there is no such file.

    Raises:
        ValueError: If the file cannot be read, naming the field.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        return About.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{str(path)!r}: {one_line(error)}") from error


def unseen_note(name: str, about: About | None, text: str) -> str | None:
    """One line for a prompt with words that the model has never seen; None where it has seen all of them.

    Args:
        name: The model's name.
        about: What its checkpoint says of itself, if anything.
        text: The prompt.
    """
    unseen = [] if about is None else about.unseen(text)
    if about is None or not unseen:
        return None
    quoted = ", ".join(f"'{word[:_LONGEST]}'" for word in unseen[:_QUOTED])
    others = len(unseen) - _QUOTED
    more = f" and {others} more {'word' if others == 1 else 'words'}" if others > 0 else ""
    return f"note: {name} has never seen {quoted}{more}; it knows {about.knows}"
