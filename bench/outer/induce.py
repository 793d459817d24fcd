"""From traces of an outer loop to a program: verified plans, whose names become slots.

A trace is a question and the lemmas that led to its answer. A look-up says which name its sentence tells of, and the
next look-up which name it points to; a sum says whether a sentence adds or takes away. What the traces say most often
is kept, so that a few wrong ones do no harm.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sigma0.bench.outer.program import Kind, Pointer, Program
from sigma0.reason.forms import part
from sigma0.reason.lemma.graph import Lemma

_ASKED = re.compile(r"What is told of (.+)\?")
_SUM = re.compile(r"\d+ ([+-]) \d+")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w+")
# A name in a question: with a capital letter, or behind an article.
_NAMED = re.compile(r"(?:[A-Z]|(?<=the )[a-z])\w*")
# What fewer traces say is left out.
FEWEST = 2


@dataclass(frozen=True)
class Trace:
    """A question that was answered, and the lemmas of its verified graph, FINAL last."""

    problem: str
    lemmas: tuple[Lemma, ...]


@dataclass(frozen=True)
class _Look:
    """A look-up of a trace: the name, its sentence, and what that points to; empty where it ends a way."""

    name: str
    sentence: str
    goal: str


def induce(traces: Iterable[Trace], fewest: int = FEWEST) -> Program:
    """The program that most traces agree with.

    Args:
        traces: Of questions that were answered, rightly as far as is known.
        fewest: Traces that have to say the same.
    """
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
    looks = [lemma for lemma in trace.lemmas if _ASKED.fullmatch(lemma.verification_strategy)]
    names = {lemma.id: _name(lemma) for lemma in looks}
    follows = {other: lemma.id for lemma in reversed(looks) for other in lemma.dependencies}
    statements = {lemma.id: lemma.statement for lemma in looks}
    ways = []
    for first in looks:
        if any(other in names for other in first.dependencies):
            continue
        at = [first.id]
        while at[-1] in follows and len(at) < len(looks):
            at.append(follows[at[-1]])
        goals = [*(names[behind] for behind in at[1:]), ""]
        ways.append([_Look(names[one], statements[one], goal) for one, goal in zip(at, goals, strict=True)])
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
    """A look-up's sentence as a template."""
    names = {"x": look.name, **({"y": look.goal or goal} if look.goal or goal else {})}
    return _NUMBER.sub("{n}", _slotted(look.sentence, names))


def _signs(trace: Trace, ways: Sequence[Sequence[_Look]], goal: str) -> Iterable[tuple[str, int]]:
    """Templates with the sign that the trace's sums say they have."""
    by_id = {lemma.id: lemma for lemma in trace.lemmas}
    looks = {look.sentence: look for way in ways for look in way}
    for lemma in trace.lemmas:
        found = _SUM.fullmatch(lemma.verification_strategy)
        if found is None:
            continue
        for other in lemma.dependencies:
            look = looks.get(by_id[other].statement) if other in by_id else None
            if look is not None:
                ends_way = not look.goal
                yield _pointer(look, goal), 1 if ends_way or found[1] == "+" else -1


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
    found = {case: answer for case, (count, answer) in best.items() if count >= fewest}
    if not at or not found:
        return None
    if "open" in found:
        return Kind(question, "open", at, found["open"])
    if not {"yes", "no"} <= set(found):
        return None
    return Kind(question, "greater" if "{z}" in found["yes"] else "same", at, found["yes"], found["no"])


def _case(answer: str) -> str:
    return "yes" if answer.startswith("Yes,") else "no" if answer.startswith("No,") else "open"


def _name(lemma: Lemma) -> str:
    found = _ASKED.fullmatch(lemma.verification_strategy)
    assert found is not None
    return found[1]


def _slotted(text: str, names: dict[str, str]) -> str:
    """A text with names as slots, at whatever case their first letter has."""
    for slot, name in names.items():
        text = re.sub(rf"\b{re.escape(name)}\b", f"{{{slot}}}", text, flags=re.IGNORECASE)
    return text
