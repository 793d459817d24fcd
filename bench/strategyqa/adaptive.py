"""L4: a router that sends a question to the level that it needs, or a pipeline; and what kind a question is, by words.

By rules, the question itself without a story before it gets a point for each of `_SIGNS`, and one where it is longer
than `LONG` and than `VERY_LONG` words. No points are simple, one is medium, more are hard. The rules look at no label,
and their numbers were fitted to none. In the pipeline a question is analysed and split, its steps are answered, and
Python combines what they say.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Level, Prediction, Question, has_words, listed, numbered, read, start
from sigma0.bench.strategyqa.logic import Value, evaluate, names_step, parse_condition, value_of
from sigma0.reason.messages import Completion
from sigma0.signals.verdict import DoorPolicy, objections

QuestionType = Literal["comparison", "temporal", "causal", "possibility", "similarity", "factual"]

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


MAX_STEPS = 5
MAX_LENGTH = 300
_CONDITION = re.compile(r"^\d*[^\w\n]*condition[^\w\n]*:[ \t]*(?:\*+[ \t]*)?(\S[^\n]*)$", re.IGNORECASE | re.MULTILINE)
_STEP = re.compile(r"#(\d{1,3})")


@dataclass(frozen=True)
class Analysis:
    """What must be known for a question, in order, and the condition on it for a yes; "" where none was stated."""

    question_type: QuestionType
    needs: tuple[str, ...]
    condition: str


def pipeline(question: Question, ask: Ask) -> Prediction:
    """L4-pipeline: fixed stages, of which the last is Python's wherever it can be.

    The analysis lists what must be known, and states a condition on it, such as `#1 < #2`. Where the steps are as many
    as those things and their answers can be compared, Python works it out; else the model is shown the answers.
    What decided, and why it was not Python, is in the trace.
    """
    trace: dict[str, Any] = {}
    said = ask(
        "analyse",
        f"Question: {question.text}\nDo not answer it yet. Write a numbered list of 2 to {MAX_STEPS} short things that "
        "must be known to answer it. Then write a last line that says when the answer is yes, such as 'Condition: #1 < "
        "#2', 'Condition: #1 = #2' or 'Condition: #1 and not #2', where #1 is the first thing.",
    )
    analysis = read_analysis(question.text, said)
    if analysis is None:
        return Prediction(None, f"analyse: no numbered thing in {start(said)}", {"analysis": said})
    trace["analysis"] = asdict(analysis)
    said = ask(
        "decompose",
        f"Question: {question.text}\nTo answer this question of {analysis.question_type}, one must know:\n"
        f"{listed(analysis.needs)}\nWrite a numbered list with one short question for each, in this order. #1 stands "
        "for the answer to the first.",
    )
    steps = [step[:MAX_LENGTH] for step in numbered(said, MAX_STEPS)]
    if not steps:
        return Prediction(None, f"decompose: no numbered question in {start(said)}", trace)
    answers: list[str] = []
    trace["steps"] = []
    for number, step in enumerate(steps, start=1):
        filled = with_answers(step, answers)
        said = ask("answer", f"{question.text}\nTo work this out, first: {filled}\nAnswer in a few words.")
        answers.append(next((line.strip() for line in said.splitlines() if has_words(line)), "")[:MAX_LENGTH])
        trace["steps"].append({"question": filled, "answer": answers[-1], "value": str(value_of(answers[-1]))})
        if not answers[-1]:
            return Prediction(None, f"answer: nothing was said to step {number}", trace)
    decided = decide(analysis, [value_of(answer) for answer in answers])
    if not isinstance(decided, str):
        return Prediction(decided, None, {**trace, "decided": "python", "why": analysis.condition})
    known = "\n".join(f"{step['question']} {step['answer']}" for step in trace["steps"])
    said = ask("combine", f"Question: {question.text}\nKnown:\n{known}\nSo, going by what is known: {FORM}")
    return read(said, "combine", {**trace, "decided": "model", "why": decided, "combined": said})


def read_analysis(question: str, text: str) -> Analysis | None:
    """An analysis out of a model's words; None where they list nothing that must be known."""
    needs = [need[:MAX_LENGTH] for need in numbered(_CONDITION.sub("", text), MAX_STEPS)]
    condition = _CONDITION.search(text)
    stated = "" if condition is None else condition.group(1).strip("`'*. \t\r")
    return Analysis(question_type(question), tuple(needs), stated) if needs else None


def with_answers(step: str, answers: Sequence[str]) -> str:
    """A step with the answers to earlier ones in place of `#1`; a number that has no answer yet stays."""

    def answer(match: re.Match[str]) -> str:
        number = int(match.group(1))
        return answers[number - 1] if 1 <= number <= len(answers) else match.group()

    return _STEP.sub(answer, step)


def decide(analysis: Analysis, values: Sequence[Value]) -> bool | str:
    """What Python makes of the condition, or why it cannot."""
    if not analysis.condition:
        return "no condition was stated"
    if len(values) != len(analysis.needs):
        return f"{len(analysis.needs)} things were to be known, and {len(values)} steps were taken"
    try:
        condition = parse_condition(analysis.condition)
    except ValueError as error:
        return str(error)
    if not names_step(condition):
        return "the condition names no step"
    return evaluate(condition, values)
