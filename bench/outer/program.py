"""A program that answers questions by templates, without a model: what `distil` makes of an outer loop's traces.

It holds how sentences point (`{x} was taken by {y}.`), how they count (`{x} is {n} years older than {y}.`: +), and what
each kind of question is answered with. A question is answered by following pointers from sentence to sentence, the last
one told of each name, up to a sentence that ends its kind.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import TypeAdapter

from sigma0.reason.forms import part

Rule = Literal["open", "same", "greater"]
_SLOT = re.compile(r"\{([xyzn])\}")
_SHAPES = {"x": r"(?:[Tt]he )?\w+", "y": r"(?:the )?\w+", "z": r"(?:the )?\w+", "n": r"\d+"}
# A way longer than any text is a circle.
_MOST_STEPS = 100


@dataclass(frozen=True)
class Pointer:
    """How a sentence tells of a name.

    Attributes:
        text: With `{x}` for the name, `{y}` for what it points to and `{n}` for a number.
        sign: Of the number that it adds to what `{y}` counts: 1, -1, or 0 for a sentence that counts nothing.
    """

    text: str
    sign: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of question.

    Attributes:
        question: With `{x}` for whom it asks about, and `{z}` for another name in it.
        rule: `open`: the answer is `yes` filled in; `same`: `yes` where the way ends at `{z}`; `greater`: `yes` where x
            counts more than z.
        ends: Texts of the pointers at which its ways end.
        yes: The answer, with slots.
        no: The answer otherwise; empty for `open`.
    """

    question: str
    rule: Rule
    ends: tuple[str, ...]
    yes: str
    no: str = ""


@dataclass(frozen=True)
class Program:
    """Pointers and kinds of questions; `answer` gives None where one of them lacks."""

    pointers: tuple[Pointer, ...]
    kinds: tuple[Kind, ...]

    def answer(self, problem: str) -> str | None:
        """The answer to a text with a question at its end.

        Raises:
            ValueError: For another text.
        """
        parts = part(problem)
        for kind in self.kinds:
            slots = match(kind.question, parts.question)
            told = None if slots is None else self._told(parts.sentences, kind, slots)
            if told is not None:
                return told
        return None

    def to_json(self) -> str:
        """The program as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """The same back.

        Raises:
            ValueError: If it is none.
        """
        return _PROGRAM.validate_json(text)

    def _told(self, told: tuple[str, ...], kind: Kind, slots: Mapping[str, str]) -> str | None:
        goal, count = self._follow(told, kind.ends, slots["x"])
        filled = {**slots, "y": goal, "n": "" if count is None else str(count)}
        if kind.rule == "greater":
            other = self._follow(told, kind.ends, slots.get("z", ""))[1]
            if count is None or other is None:
                return None
            return fill(kind.yes if count > other else kind.no, filled)
        if not goal and count is None:
            return None
        return fill(kind.yes if kind.rule == "open" or _bare(goal) == _bare(slots.get("z", "")) else kind.no, filled)

    def _follow(self, told: tuple[str, ...], ends: tuple[str, ...], name: str) -> tuple[str, int | None]:
        """Where a way from a name ends, and what it counts; empty and None where it breaks off."""
        total, counts = 0, False
        for _ in range(_MOST_STEPS):
            found = self._last(told, name)
            if found is None:
                return "", None
            pointer, slots = found
            if pointer.sign:
                counts, total = True, total + pointer.sign * int(slots.get("n", "0"))
            if pointer.text in ends:
                return slots.get("y", ""), total if counts else None
            name = slots.get("y", "")
        return "", None

    def _last(self, told: tuple[str, ...], name: str) -> tuple[Pointer, dict[str, str]] | None:
        for sentence in reversed(told):
            for pointer in self.pointers:
                slots = match(pointer.text, sentence)
                if slots is not None and _bare(slots["x"]) == _bare(name):
                    return pointer, slots
        return None


_PROGRAM: TypeAdapter[Program] = TypeAdapter(Program)


def match(template: str, text: str) -> dict[str, str] | None:
    """What stands in a template's slots in a text; None where it does not fit."""
    found = _pattern(template).fullmatch(text)
    return None if found is None else found.groupdict()


def fill(template: str, slots: Mapping[str, Any]) -> str:
    """A template with its slots filled, as a sentence."""
    text = _SLOT.sub(lambda slot: str(slots.get(slot[1], "")), template)
    return f"{text[:1].upper()}{text[1:]}"


@lru_cache(maxsize=4096)
def _pattern(template: str) -> "re.Pattern[str]":
    parts = _SLOT.split(template)
    texts, slots = parts[::2], parts[1::2]
    spelled = [re.escape(text) for text in texts]
    shapes = [
        f"(?P={slot})" if slot in slots[:place] else f"(?P<{slot}>{_SHAPES[slot]})" for place, slot in enumerate(slots)
    ]
    return re.compile("".join(text + shape for text, shape in zip(spelled, [*shapes, ""], strict=True)))


def _bare(name: str) -> str:
    return name.lower().removeprefix("the ")
