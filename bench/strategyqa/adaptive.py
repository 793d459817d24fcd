"""L4: a router that sends a question to the level that it needs.

By rules, the question itself without a story before it gets a point for each of `_SIGNS`, and one where it is longer
than `LONG` and than `VERY_LONG` words. No points are simple,
one is medium, more are hard. The rules look at no label, and their numbers were fitted to none.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, read, start
from sigma0.bench.strategyqa.question_types import COMPARATIVES, POSSIBILITIES, asked
from sigma0.reason.messages import Completion
from sigma0.signals.verdict import DoorPolicy, objections

Difficulty = Literal["simple", "medium", "hard"]
Route = Literal["rules", "model", "verdict"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)

LONG, VERY_LONG = 10, 16
_CONJUNCTIONS = "and|or|nor|but|if|unless|both|either|neither|while|although|though|because"
_SIGNS = {
    "comparison": re.compile(rf"\b(?:{COMPARATIVES})\b", re.IGNORECASE),
    "number": re.compile(r"\d"),
    "conjunction": re.compile(rf"\b(?:{_CONJUNCTIONS})\b", re.IGNORECASE),
    "possibility": re.compile(rf"\b(?:{POSSIBILITIES})\b", re.IGNORECASE),
}
_WORD = re.compile(r"\W*(simple|medium|hard)\W*", re.IGNORECASE)


def adaptive(levels: Sequence[Level], route: Route, question: Question, ask: Ask) -> Prediction:
    """Sends a question to a level by its difficulty.

    By `verdict` it is asked as L0 does first. Where that answer's door is `converge` it stands, whatever it says;
    with two objections to the verdict or more the question is hard, with fewer, or without a verdict, it is medium.
    Levels are of simple, medium and hard questions.
    """
    difficulty, why = by_rules(question.text)
    trace: dict[str, Any] = {}
    if route == "verdict":
        first = ask("first", f"{question.text}\n{FORM}")
        completion = ask.asked[-1].answer
        difficulty, why = by_verdict(completion)
        trace = {"first": first, "door": completion.door}
    elif route == "model":
        said = ask(
            "route",
            f"Question: {question.text}\nHow hard is it to answer? Reply with one word: simple, medium or hard.",
        )
        word = _WORD.fullmatch(said)
        if word is None:
            trace = {"unread_route": f"route: none of {', '.join(DIFFICULTIES)} but {start(said)}"}
        else:
            difficulty, why = cast(Difficulty, word.group(1).lower()), "the model says so"
    told: dict[str, Any] = {"route": route, "difficulty": difficulty, "why": why}
    if trace.get("door") == "converge":
        return read(trace["first"], "first", told | trace)
    level = levels[DIFFICULTIES.index(difficulty)]
    found = level.predict(question, ask)
    miss = None if found.miss is None else f"{level.name}: {found.miss}"
    return Prediction(found.answer, miss, {**told, "level": level.name, **trace, "trace": found.trace})


def by_rules(text: str) -> tuple[Difficulty, str]:
    """The difficulty of a question by the table above, and what was found."""
    question = asked(text)
    words = len(question.split())
    found = [f"more than {limit} words" for limit in (LONG, VERY_LONG) if words > limit]
    found += [name for name, sign in _SIGNS.items() if sign.search(question)]
    return DIFFICULTIES[min(len(found), 2)], ", ".join(found) or "no sign"


def by_verdict(completion: Completion) -> tuple[Difficulty, str]:
    """The difficulty of a question by its first answer, and why; simple is one whose first answer stands."""
    if completion.door == "converge":
        return "simple", "its door is converge"
    if completion.verdict is None:
        return "medium", "its first answer has no verdict"
    found = objections(completion.verdict, DoorPolicy())
    return ("hard" if len(found) > 1 else "medium"), "; ".join(found) or f"its door is {completion.door}"
