"""L4 as a pipeline: a question is analysed and split, its steps are answered, and Python combines what they say."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sigma0.bench.strategyqa.adaptive import QuestionType, question_type
from sigma0.bench.strategyqa.asking import Ask
from sigma0.bench.strategyqa.level import FORM, Prediction, Question, has_words, listed, numbered, read, start
from sigma0.bench.strategyqa.logic import Value, evaluate, names_step, parse_condition, value_of

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
