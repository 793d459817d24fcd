"""Examples and grammars of the forms: all that a taught model replies is allowed, and nothing that cannot be read."""

import json
from random import Random

import pytest

from sigma0.bench.pocket.forms import in_form, solution
from sigma0.bench.pocket.world import draw
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.forms import FORMS
from sigma0.reason.lemma.graph import MAX_LEMMAS
from sigma0.reason.messages import ChatSettings
from sigma0.reason.shown_forms import ShownForms, form_of, grammar_of

pytestmark = pytest.mark.slow

STORY = "The hat is with Mary. Mary went to the park. Where is the hat?"


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_taught_is_allowed(allows, form):
    for number in range(40):
        item = draw("test", 2, number, questions=1).items[0]
        if len(solution(item)) <= MAX_LEMMAS:
            asked = in_form(item, form, Random(number))
            assert form_of(asked.prompt) == form
            assert allows(grammar_of(form, asked.prompt), asked.answer), asked.answer


@pytest.mark.grid(fast=5, slow=1)
@pytest.mark.parametrize(
    ("ending", "reply"),
    [
        ("What is told of Mary?", "Mary went to the barn."),
        ("What is told of Mary?", "Where is the hat?"),
        ("The hat is in the park. Right?", "Maybe."),
        ("The hat is in the park. Right?", "The hat is with Mary. So the hat is in the park."),
        ("Next?", '{"act": "look", "at": "John"}'),
        ("Next?", '{"act": "run", "at": "Mary"}'),
        ("Plan.", '{"FINAL": {"statement": "No"'),
        ("Plan.", '{"L1": {"verify": "What is told of Mary?", "statement": "Mary went to the barn."}}'),
    ],
)
def test_what_cannot_be_read_or_is_not_in_the_text_is_not_allowed(allows, ending, reply):
    question = f"{STORY} {ending}"
    assert not allows(grammar_of(form_of(question), question), reply)


def test_quotes_of_a_text_are_escaped_in_a_plan(allows):
    question = 'Mary said "hi" to Ann. Who spoke? Plan.'
    lemma = {"verify": "What is told of Mary?", "statement": 'Mary said "hi" to Ann.'}
    plan = json.dumps({"L1": lemma, "FINAL": {"statement": "Mary spoke.", "depends": "L1"}})
    grammar = grammar_of("plan", question)
    assert allows(grammar, plan) and not allows(grammar, plan.replace('\\"', '"'))


def test_examples_stand_before_the_question_and_the_grammar_goes_with_it():
    chat = ScriptedChat(["x", "y"])
    shown = {"act": [("A. Who? Next?", json.dumps({"act": "look", "at": "A"}))]}
    settings = ChatSettings(max_tokens=7, temperature=0.5)
    ShownForms(chat, shown).complete([{"role": "user", "content": f"{STORY} Next?"}], settings)
    asked = chat.calls[0]
    assert [turn["role"] for turn in asked["messages"]] == ["user", "assistant", "user"]
    assert (asked["max_tokens"], asked["temperature"]) == (7, 0.5)
    assert asked["grammar"] == grammar_of("act", f"{STORY} Next?")
    ShownForms(chat, shown, is_held=False).complete([{"role": "user", "content": STORY}], settings)
    assert chat.calls[1]["grammar"] is None and len(chat.calls[1]["messages"]) == 1
