"""What kind of question one is, by the words that stand in it: rules, no model.

The first kind of `_RULES` that holds a word of the question decides; without any it is factual.
"""

import re
from typing import Literal, get_args

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
