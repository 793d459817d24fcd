"""The forms for a model that was not taught them: shown by examples, and held to by a grammar.

Every question of `sigma0.reason.forms` is asked after examples of its form, and the reply can be nothing else than
that form allows: sentences that are quoted are sentences of the text, names are its names. What such a reply says may
still be wrong; that it can be read is all that the grammar gives.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sigma0.checkpoints.about import Form
from sigma0.config import Messages
from sigma0.reason.forms import NEXT, NO, PLAN, RIGHT, YES, asking, sentences
from sigma0.reason.lemma.graph import MAX_LEMMAS
from sigma0.reason.messages import DEFAULTS, ChatModel, ChatSettings, Completion

Shown = Mapping[Form, Sequence[tuple[str, str]]]
_ASKED = re.compile(r"What is told of [^?]{1,40}\?$")
_CAPITAL = re.compile(r"\b[A-Z][a-z]+\b")
_THING = re.compile(r"\bthe [a-z]+\b", re.IGNORECASE)
# A sentence that is no quotation: sums and conclusions.
# One among reasons, where `So` begins what follows from them.
_NO_END = "/([A-RT-Z]|S[a-np-z])[A-Za-z0-9 ,]{0,80}\\./"
# The longest way of the micro-world has nine sentences and as many sums.
_MOST_REASONS = 18
_OTHER = "OTHER: /[A-Z][A-Za-z0-9 ,]{0,80}\\./"


class ShownForms:
    """A chat model that is asked in forms by examples; a `ChatModel`.

    Args:
        model: Who is asked.
        shown: Questions and replies of each form, to be put before a question.
        is_held: Whether replies are held to the form's grammar.
    """

    def __init__(self, model: ChatModel, shown: Shown, is_held: bool = True) -> None:
        self.name = model.name
        self._model, self._shown, self._is_held = model, shown, is_held

    def complete(self, messages: Messages, settings: ChatSettings = DEFAULTS) -> Completion:
        """See `ChatModel`; of the last message alone."""
        question = messages[-1]["content"]
        form = form_of(question)
        turns = []
        for asked, reply in self._shown.get(form, ()):
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        grammar = grammar_of(form, question) if self._is_held else None
        return self._model.complete([*turns, {"role": "user", "content": question}], replace(settings, grammar=grammar))


def form_of(question: str) -> Form:
    """The form that a question is of, by its end."""
    ends: dict[str, Form] = {PLAN: "plan", NEXT: "act", RIGHT: "check"}
    for end, form in ends.items():
        if question.endswith(f" {end}"):
            return form
    return "look" if _ASKED.search(question) else "answer"


def grammar_of(form: Form, question: str) -> str:
    """What a reply may be, in Lark's notation.

    Args:
        form: Of the question.
        question: Its text is what sentences and names are taken from.
    """
    output = sentences(question)
    # the question itself is none of them, nor what stands behind it
    quoted = [one for one in output if one.endswith(".") and one != PLAN]
    said = f"SAID: {_either(quoted or ['.'])}"
    if form == "look":
        return f"start: SAID\n{said}"
    if form == "answer":
        return f"start: OTHER\n{_OTHER}"
    if form == "check":
        rules = (f'start: (REASON " ")~0..{_MOST_REASONS} "So " WORDS " " LABEL', f"REASON: SAID | {_NO_END}", said)
        return "\n".join((*rules, f"LABEL: {_either((YES, NO))}", "WORDS: /[A-Za-z0-9 ,]{1,80}\\./"))
    named = f"NAMED: {_either(_names(question))}"
    if form == "act":
        ways = (
            '"{\\"act\\": \\"look\\", \\"at\\": \\"" NAMED "\\"}"',
            '"{\\"act\\": \\"note\\", \\"text\\": \\"" OTHER "\\"}"',
            '"{\\"act\\": \\"answer\\", \\"text\\": \\"" OTHER "\\"}"',
        )
        return f"start: {' | '.join(ways)}\n{_OTHER}\n{named}"
    # inside of JSON
    escaped = [json.dumps(one, ensure_ascii=False)[1:-1] for one in quoted]
    return _plan_grammar(f"SAID: {_either(escaped or ['.'])}", named)


def _plan_grammar(said: str, named: str) -> str:
    """Up to nine lemmas, each a look-up or a sum, then FINAL."""
    ask_before, ask_behind = asking("|").split("|")
    look = f'"{{\\"verify\\": \\"{ask_before}" NAMED "{ask_behind}\\", \\"statement\\": \\"" SAID "\\"" DEPENDS? "}}"'
    total = '"{\\"verify\\": \\"" SUM "\\", \\"statement\\": \\"" OTHER "\\"" DEPENDS? "}"'
    numbers = range(1, MAX_LEMMAS)
    lemmas = "".join(f'("\\"L{number}\\": " lemma ", " ' for number in numbers) + ")?" * len(numbers)
    return "\n".join(
        (
            f'start: "{{" {lemmas} "\\"FINAL\\": " final "}}"',
            f"lemma: {look} | {total}",
            f'final: "{{\\"statement\\": \\"" OTHER "\\"" DEPENDS? "}}" | {total}',
            'DEPENDS: ", \\"depends\\": \\"L" /[1-9](, L[1-9]){0,3}/ "\\""',
            "SUM: /[0-9]{1,2} [+-] [0-9]{1,2}/",
            _OTHER,
            said,
            named,
        )
    )


def _names(question: str) -> list[str]:
    text = " ".join(sentences(question))
    result = [*(one for one in _CAPITAL.findall(text) if one != "The"), *map(str.lower, _THING.findall(text))]
    return list(dict.fromkeys(result)) or ["nobody"]


def _either(texts: Sequence[str]) -> str:
    return " | ".join(json.dumps(text) for text in dict.fromkeys(texts))
