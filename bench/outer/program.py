"""A program that answers questions by templates, without a model, and how `distill` makes it of an outer loop's traces.

It holds how sentences point (`{x} was taken by {y}.`), how they count (`{x} is {n} years older than {y}.`: +), and what
each kind of question is answered with. A question is answered by following pointers from sentence to sentence, the last
one told of each name, up to a sentence that ends its kind.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from sigma0.reason.forms import part
from sigma0.reason.lemma.graph import Lemma

Rule = Literal["open", "same", "greater"]
_SLOT = re.compile(r"\{([xyzn])\}")
_SHAPES = {"x": r"(?:[Tt]he )?\w+", "y": r"(?:the )?\w+", "z": r"(?:the )?\w+", "n": r"\d+"}
# A way longer than any text is a circle.
_MOST_STEPS = 100
_ASKED = re.compile(r"What is told of (.+)\?")
_SUM = re.compile(r"\d+ ([+-]) \d+")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w+")
# A name in a question: with a capital letter, or after an article.
_NAMED = re.compile(r"(?:[A-Z]|(?<=the )[a-z])\w*")
# What fewer traces say is left out.
FEWEST = 2


@dataclass(frozen=True)
class Pointer:
    """How a sentence tells of a name `{x}`: what it points to, `{y}`, and a number `{n}`.

    The sign is that of the number, which is added to what `{y}` counts; 0 for a sentence that counts nothing.
    """

    text: str
    sign: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of question."""

    question: str  # With `{x}` for whom it asks about, and `{z}` for another name in it
    # `open`: the answer is `yes` filled in; `same`: `yes` where the way ends at `{z}`; `greater`: `yes` where x
    # counts more than z
    rule: Rule
    ends: tuple[str, ...]  # Texts of the pointers at which its ways end
    yes: str  # The answer, with slots
    no: str = ""  # The answer otherwise; empty for `open`


@dataclass(frozen=True)
class Program:
    """Pointers and kinds of questions; `answer` gives None where one of them lacks."""

    pointers: tuple[Pointer, ...]
    kinds: tuple[Kind, ...]

    def answer(self, problem: str) -> str | None:
        """The answer to a text with a question at its end."""
        parts = part(problem)
        for kind in self.kinds:
            slots = match(kind.question, parts.question)
            output = None if slots is None else self._told(parts.sentences, kind, slots)
            if output is not None:
                return output
        return None

    def _told(self, output: tuple[str, ...], kind: Kind, slots: Mapping[str, str]) -> str | None:
        goal, count = self._follow(output, kind.ends, slots["x"])
        filled = {**slots, "y": goal, "n": "" if count is None else str(count)}
        if kind.rule == "greater":
            other = self._follow(output, kind.ends, slots.get("z", ""))[1]
            if count is None or other is None:
                return None
            return fill(kind.yes if count > other else kind.no, filled)
        if not goal and count is None:
            return None
        return fill(kind.yes if kind.rule == "open" or _bare(goal) == _bare(slots.get("z", "")) else kind.no, filled)

    def _follow(self, output: tuple[str, ...], ends: tuple[str, ...], name: str) -> tuple[str, int | None]:
        """Where a way from a name ends, and what it counts; empty and None where it breaks off."""
        total, counts = 0, False
        for _ in range(_MOST_STEPS):
            result = self._last(output, name)
            if result is None:
                return "", None
            pointer, slots = result
            if pointer.sign:
                counts, total = True, total + pointer.sign * int(slots.get("n", "0"))
            if pointer.text in ends:
                return slots.get("y", ""), total if counts else None
            name = slots.get("y", "")
        return "", None

    def _last(self, output: tuple[str, ...], name: str) -> tuple[Pointer, dict[str, str]] | None:
        for sentence in reversed(output):
            for pointer in self.pointers:
                slots = match(pointer.text, sentence)
                if slots is not None and _bare(slots["x"]) == _bare(name):
                    return pointer, slots
        return None


def match(template: str, text: str) -> dict[str, str] | None:
    """What stands in a template's slots in a text; None where it does not fit."""
    result = _pattern(template).fullmatch(text)
    return None if result is None else result.groupdict()


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


class Trace(NamedTuple):
    """A question that was answered, and the lemmas of its verified graph, FINAL last."""

    problem: str
    lemmas: tuple[Lemma, ...]


class _Look(NamedTuple):
    """A look-up of a trace: the name, its sentence, and what that points to; empty where it ends a way."""

    name: str
    sentence: str
    goal: str


def induce(traces: Iterable[Trace], fewest: int = FEWEST) -> Program:
    """The program that most traces of answered questions agree with; `fewest` of them have to say the same."""
    pointers: Counter[str] = Counter()
    signs: Counter[tuple[str, int]] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    answers: Counter[tuple[str, str, str]] = Counter()
    for trace in traces:
        ways = _ways(trace)
        if not ways:
            continue
        question, answer, goal = _asked(trace, ways)
        for way in ways:
            texts = [_pointer(look, goal) for look in way]
            pointers.update(texts)
            ends[question, texts[-1]] += 1
        signs.update(_signs(trace, ways, goal))
        answers[question, answer, _case(answer)] += 1
    known = tuple(
        Pointer(text, _sign(signs, text)) for text, count in pointers.most_common() if count >= fewest and "{x}" in text
    )
    questions = dict.fromkeys(question for question, _, _ in answers)
    kinds = (_kind(question, ends, answers, fewest) for question in questions)
    return Program(known, tuple(kind for kind in kinds if kind is not None))


def _ways(trace: Trace) -> list[list[_Look]]:
    """The look-ups of a trace, way by way."""
    asked = ((lemma, _ASKED.fullmatch(lemma.verification_strategy)) for lemma in trace.lemmas)
    looks = {lemma.id: (result[1], lemma) for lemma, result in asked if result is not None}
    follows = {other: one for one, (_, lemma) in reversed(looks.items()) for other in lemma.dependencies}
    ways = []
    for first, (_, lemma) in looks.items():
        if any(other in looks for other in lemma.dependencies):
            continue
        at = [first]
        while at[-1] in follows and len(at) < len(looks):
            at.append(follows[at[-1]])
        goals = [*(looks[after][0] for after in at[1:]), ""]
        ways.append([_Look(looks[one][0], looks[one][1].statement, goal) for one, goal in zip(at, goals, strict=True)])
    return ways


def _asked(trace: Trace, ways: Sequence[Sequence[_Look]]) -> tuple[str, str, str]:
    """Question and answer as templates, and the word that the first way ends at; empty where it ends at a number."""
    question, answer = part(trace.problem).question, trace.lemmas[-1].statement
    last = ways[0][-1].sentence
    words = [] if _NUMBER.search(last) else [word for word in _WORD.findall(last) if word in _WORD.findall(answer)]
    goal = words[-1] if words and words[-1] not in (*ways[0][0].name.split(), *ways[0][-1].name.split()) else ""
    names = {"x": ways[0][0].name}
    if len(ways) > 1:
        names["z"] = ways[1][0].name
    elif _case(answer) != "open":
        others = [word for word in _NAMED.findall(question[1:]) if word not in names["x"].split()]
        names |= {"z": others[-1]} if others else {}
    question = _slotted(question, names)
    filled = {"x": names["x"], **({"y": goal} if goal else {}), **({"z": names["z"]} if len(ways) > 1 else {})}
    answer = _slotted(answer, filled)
    return question, _NUMBER.sub("{n}", answer), goal


def _pointer(look: _Look, goal: str) -> str:
    names = {"x": look.name, **({"y": look.goal or goal} if look.goal or goal else {})}
    return _NUMBER.sub("{n}", _slotted(look.sentence, names))


def _signs(trace: Trace, ways: Sequence[Sequence[_Look]], goal: str) -> Iterator[tuple[str, int]]:
    """Templates with the sign that the trace's sums say they have."""
    statements = {lemma.id: lemma.statement for lemma in trace.lemmas}
    looks = {look.sentence: look for way in ways for look in way}
    for lemma in trace.lemmas:
        result = _SUM.fullmatch(lemma.verification_strategy)
        if result is None:
            continue
        for other in lemma.dependencies:
            look = looks.get(statements.get(other, ""))
            if look is not None:
                yield _pointer(look, goal), -1 if look.goal and result[1] == "-" else 1


def _sign(signs: Counter[tuple[str, int]], text: str) -> int:
    """The sign that most traces say; 1 for a sentence that ends in a number and that no sum speaks of."""
    plus, minus = signs[text, 1], signs[text, -1]
    if plus or minus:
        return 1 if plus >= minus else -1
    return 1 if "{n}" in text and "{y}" not in text else 0


def _kind(
    question: str, ends: Counter[tuple[str, str]], answers: Counter[tuple[str, str, str]], fewest: int
) -> Kind | None:
    """How a question is answered; None where too few traces say it."""
    at = tuple(text for (asked, text), count in ends.items() if asked == question and count >= fewest)
    best: dict[str, tuple[int, str]] = {}
    for (asked, answer, case), count in answers.items():
        if asked == question and count > best.get(case, (0, ""))[0]:
            best[case] = count, answer
    result = {case: answer for case, (count, answer) in best.items() if count >= fewest}
    if not at or not result:
        return None
    if "open" in result:
        return Kind(question, "open", at, result["open"])
    if not {"yes", "no"} <= set(result):
        return None
    return Kind(question, "greater" if "{z}" in result["yes"] else "same", at, result["yes"], result["no"])


def _case(answer: str) -> str:
    return "yes" if answer.startswith("Yes,") else "no" if answer.startswith("No,") else "open"


def _slotted(text: str, names: dict[str, str]) -> str:
    """A text with names as slots, at whatever case their first letter has."""
    for slot, name in names.items():
        text = re.sub(rf"\b{re.escape(name)}\b", f"{{{slot}}}", text, flags=re.IGNORECASE)
    return text
