"""The forms in which a small model that was taught them is asked, and how its replies are read.

A problem is a text and, last, a question. Each form is the text with another end:

| form | the message ends in | the reply |
|---|---|---|
| answer | the question | the answer |
| look | `What is told of NAME?` | the sentence of the text that says it, word for word |
| check | the question, an answer and `Right?` | sentences as reasons, `So ...`, then `Yes.` or `No.` |
| plan | the question, what is known, and `Plan.` | lemmas in JSON, one look-up or one sum each, FINAL last |
| act | the question, what is known, and `Next?` | one action in JSON: look, note or answer |

Which of them a model knows is said by its card (`forms` of `about.json`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sigma0.checkpoints.about import Form

FORMS: tuple[Form, ...] = get_args(Form)
Act = Literal["look", "note", "answer"]
RIGHT, PLAN, NEXT = "Right?", "Plan.", "Next?"
YES, NO = "Yes.", "No."
MAX_PROBLEM = 8_000
EXAMPLE = "Mary went to the park. Where is Mary?"
# After these a yes or no question repeats a statement's words as they are, but for a verb's ending after `Does`.
_ASKS = ("Is", "Are", "Does")
_DENIES = frozenset(("not", "no", "never", "nobody", "nothing"))
_SENTENCE = re.compile(r"[^.?!]*[.?!]")
_WORD = re.compile(r"\w+")
_ACTS: tuple[Act, ...] = get_args(Act)


@dataclass(frozen=True)
class Parts:
    """A problem's text and its question."""

    text: str
    question: str

    @property
    def sentences(self) -> tuple[str, ...]:
        """Those of the text."""
        return sentences(self.text)


@dataclass(frozen=True)
class Check:
    """What a model says of a proposed answer."""

    reasons: tuple[str, ...]  # Sentences, in order
    conclusion: str  # What it concludes, without the `So`; empty where it says nothing
    is_right: bool | None  # Its last word; None where that is neither yes nor no


@dataclass(frozen=True)
class Action:
    """What a model does next: `look` at a name, `note` a sentence, or `answer` with one."""

    act: Act
    what: str


def part(problem: str) -> Parts:
    """Parts a problem.

    Raises:
        ValueError: Where it does not end in a question after a text.
    """
    if len(problem) > MAX_PROBLEM:
        raise ValueError(f"a problem has at most {MAX_PROBLEM} characters, got {len(problem)}")
    whole = problem.strip()
    start = 1 + max(whole.rfind(sign, 0, max(len(whole) - 1, 0)) for sign in ".?!")
    text, question = whole[:start].strip(), whole[start:].strip()
    if not whole.endswith("?") or not text or len(question) < 2:
        raise ValueError(
            f"a text with a question at its end is needed, got {problem[-80:]!r}: it answers what a story says, "
            f"as in {EXAMPLE!r}; ask another one for the rest (--model, --base-url)"
        )
    return Parts(text, question)


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each with the sign that ends it."""
    return tuple(result.strip() for result in _SENTENCE.findall(text))


def settled(question: str, answer: str) -> str:
    """An answer by yes or no, with the one of the two that its own statement gives; any other as it is.

    Whoever answers "Is the hat in the park?" by "the hat is in the barn" means no, whichever word stands before it: it
    is yes if the statement holds the words of the question after its first, in their order, a verb's ending aside. A
    statement that denies, and a question of another kind, are left to whoever answered.
    """
    label, comma, statement = answer.partition(", ")
    verb, *asked = _WORD.findall(question) or [""]
    output = [word.lower() for word in _WORD.findall(statement)]
    if not comma or label not in ("Yes", "No") or verb not in _ASKS or _DENIES & set(output):
        return answer
    rest = iter(output)
    endings = ("", "s") if verb == "Does" else ("",)
    repeats = all(any(result in [f"{word.lower()}{end}" for end in endings] for result in rest) for word in asked)
    return f"{'Yes' if repeats else 'No'}, {statement}"


def looking(text: str, name: str) -> str:
    """Asks for the sentence that tells of a name."""
    return f"{text} {asking(name)}"


def asking(name: str) -> str:
    """The question of a look-up."""
    return f"What is told of {name}?"


def checking(parts: Parts, answer: str) -> str:
    """Asks whether an answer is right, and why."""
    return f"{parts.text} {parts.question} {answer} {RIGHT}"


def planning(parts: Parts, known: Sequence[str] = ()) -> str:
    """Asks for the steps that are left after what is known."""
    return " ".join((parts.text, parts.question, *known, PLAN))


def acting(parts: Parts, known: Sequence[str] = ()) -> str:
    """Asks for the next step behind what is known."""
    return " ".join((parts.text, parts.question, *known, NEXT))


def read_check(reply: str) -> Check:
    """The reply to `checking`."""
    said = sentences(reply)
    label = said[-1] if said else ""
    before = said[:-1] if label in (YES, NO) else said
    concludes = bool(before) and before[-1].startswith("So ")
    conclusion = before[-1][3:] if concludes else ""
    is_right = {YES: True, NO: False}.get(label)
    return Check(before[:-1] if concludes else before, f"{conclusion[:1].upper()}{conclusion[1:]}", is_right)


def write_action(action: Action) -> str:
    """An action as the JSON that `read_action` reads."""
    key = "at" if action.act == "look" else "text"
    return json.dumps({"act": action.act, key: action.what}, ensure_ascii=False)


def read_action(reply: str) -> Action:
    """The reply to `acting`.

    Raises:
        ValueError: Where it is no such JSON.
    """
    try:
        value: Any = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the action is no JSON: {reply[:80]!r}") from error
    act = next((act for act in _ACTS if isinstance(value, dict) and value.get("act") == act), None)
    what = value.get("at" if act == "look" else "text") if act is not None else None
    if act is None or not isinstance(what, str) or not what or len(value) != 2:
        raise ValueError(f"no action of the form 'look at' or 'note' or 'answer' with a text: {reply[:80]!r}")
    if len(what) > MAX_PROBLEM or any("\ud800" <= sign <= "\udfff" for sign in what):
        raise ValueError(f"the action's text is longer than {MAX_PROBLEM} characters, or no UTF-8: {reply[:80]!r}")
    return Action(act, what)
