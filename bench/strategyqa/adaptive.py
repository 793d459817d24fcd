"""L4: a router that sends a question to the level that it needs; and what kind of question one is, by its words.

By rules, the question itself without a story before it gets a point for each of `_SIGNS`, and one where it is longer
than `LONG` and than `VERY_LONG` words. No points are simple,
one is medium, more are hard. The rules look at no label, and their numbers were fitted to none.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, read, start
from sigma0.reason.messages import Completion
from sigma0.signals.verdict import DoorPolicy, objections

QuestionType = Literal["comparison", "temporal", "causal", "possibility", "similarity", "factual"]
QUESTION_TYPES: tuple[QuestionType, ...] = get_args(QuestionType)

COMPARATIVES = (
    "than|compared?|compar(?:ing|ison)|exceed(?:s|ed)?|outnumber(?:s|ed)?|enough|more|most|less|least|fewer|fewest|"
    "(?:old|young|larg|bigg|small|tall|short|long|high|low|great|fast|slow|heav|light|rich|poor|cheap|clos|strong|weak|"
    "hott|cold|warm|wid|deep|earl|lat|hard|eas|happ)i?(?:er|est)|better|best|worst"
)
POSSIBILITIES = (
    "can|can't|cannot|could|couldn't|would|wouldn't|might|may|possibl[ey]|able|unable|likely|hypothetically|"
    "theoretically"
)
_RULES: tuple[tuple[QuestionType, re.Pattern[str]], ...] = tuple(
    (name, re.compile(rf"\b(?:{words})\b", re.IGNORECASE))  # type: ignore[misc]
    for name, words in (
        (
            "similarity",
            "same|alike|(?:dis)?similar(?:ity|ities|ly)?|differ(?:s|ent|ence|ences)?|resembl(?:e|es|ed)|identical|"
            "equal(?:s|led)?|equivalent|overlap(?:s|ped)?|in common|match(?:es|ed)?",
        ),
        ("comparison", COMPARATIVES),
        (
            "temporal",
            "when|before|after|during|ago|years?|century|centuries|decades?|eras?|ages?|aged|alive|lifetime|ever|"
            r"1\d{3}s?|20\d{2}s?",
        ),
        (
            "causal",
            "why|because|caus(?:e|es|ed|ing)|due to|leads? to|led to|results?|resulted|affect(?:s|ed)?|effects?|"
            "prevent(?:s|ed)?|harm(?:s|ed|ful)?|thanks|responsible",
        ),
        ("possibility", POSSIBILITIES),
    )
)
_BEGINS = (
    "is|are|was|were|am|do|does|did|has|have|had|can|could|would|will|should|might|may|must|who|what|which|when|where|"
    "why|how|if|in"
)
_LAST = re.compile(rf"[.!?]\s+(?=(?:{_BEGINS})\b[^.!?]*\?\s*$)", re.IGNORECASE)


def asked(text: str) -> str:
    """The question itself, without the story or the sentences that stand before it."""
    return _LAST.split(text)[-1].strip()


def question_type(text: str) -> QuestionType:
    """The kind of a question, by the table above; a story before it does not count."""
    question = asked(text)
    return next((name for name, words in _RULES if words.search(question)), "factual")


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
    output: dict[str, Any] = {"route": route, "difficulty": difficulty, "why": why}
    if trace.get("door") == "converge":
        return read(trace["first"], "first", output | trace)
    level = levels[DIFFICULTIES.index(difficulty)]
    result = level.predict(question, ask)
    miss = None if result.miss is None else f"{level.name}: {result.miss}"
    return Prediction(result.answer, miss, {**output, "level": level.name, **trace, "trace": result.trace})


def by_rules(text: str) -> tuple[Difficulty, str]:
    """The difficulty of a question by the table above, and what was found."""
    question = asked(text)
    words = len(question.split())
    result = [f"more than {limit} words" for limit in (LONG, VERY_LONG) if words > limit]
    result += [name for name, sign in _SIGNS.items() if sign.search(question)]
    return DIFFICULTIES[min(len(result), 2)], ", ".join(result) or "no sign"


def by_verdict(completion: Completion) -> tuple[Difficulty, str]:
    """The difficulty of a question by its first answer, and why; simple is one whose first answer stands."""
    if completion.door == "converge":
        return "simple", "its door is converge"
    if completion.verdict is None:
        return "medium", "its first answer has no verdict"
    result = objections(completion.verdict, DoorPolicy())
    return ("hard" if len(result) > 1 else "medium"), "; ".join(result) or f"its door is {completion.door}"
