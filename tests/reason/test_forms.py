"""What is asked in each form, and what of the replies can be read."""

import json

import pytest

from sigma0.reason.forms import Action, Check, part, read_action, read_check, settled, write_action

STORY = "The hat is with Mary. Mary went to the park."
PARTS = part(f"{STORY} Where is the hat?")


def test_a_problem_is_a_text_and_its_question():
    assert (PARTS.text, PARTS.question) == (STORY, "Where is the hat?")
    assert PARTS.sentences == ("The hat is with Mary.", "Mary went to the park.")
    for bad in ("", "?", "Where is the hat?", STORY, "Where? " + STORY):
        with pytest.raises(ValueError, match="with a question at its end"):
            part(bad)
    with pytest.raises(ValueError, match="at most 8000 characters, got 900001"):
        part("a" * 900_000 + "?")


@pytest.mark.parametrize(
    ("reply", "check"),
    [
        ("A is B. C is D. So the hat is there. Yes.", Check(("A is B.", "C is D."), "The hat is there.", True)),
        ("So no, it is not. No.", Check((), "No, it is not.", False)),
        ("A is B. Yes.", Check(("A is B.",), "", True)),
        ("A is B. So it is.", Check(("A is B.",), "It is.", None)),
        ("No. Yes. A is B.", Check(("No.", "Yes.", "A is B."), "", None)),
        ("", Check((), "", None)),
    ],
)
def test_only_the_last_word_of_a_check_is_its_label(reply, check):
    assert read_check(reply) == check


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Is the hat in the park?", "Yes, the hat is in the park."),
        ("Is the hat in the park?", "No, the hat is in the barn."),
        ("Is Ann older than Tom?", "Yes, Ann is older than Tom."),
        ("Is Ann older than Tom?", "No, Ann is younger than Tom."),
        ("Does the family of Ann come from Oslo?", "Yes, the family of Ann comes from Oslo."),
        ("Does the family of Ann come from Oslo?", "No, the family of Ann comes from Rome."),
    ],
)
def test_yes_or_no_is_what_the_statement_gives(question, answer):
    label, _, statement = answer.partition(", ")
    other = {"Yes": "No", "No": "Yes"}[label]
    assert settled(question, answer) == settled(question, f"{other}, {statement}") == answer
    for open_answer in ("The hat is in the park.", "Yes.", "", "Maybe, the hat is there."):
        assert settled(question, open_answer) == open_answer
    # what the words do not decide is left as it was said
    for question, answer in (
        ("Is Ann older than Bob?", "No, Bob is older than Ann."),
        ("Is the hat in the park?", "No, the hat is not in the park."),
        ("Did Mary go to the park?", "Yes, Mary went to the park."),
        ("Who has the hat?", "Yes, Mary has the hat."),
    ):
        assert settled(question, answer) == answer


def test_actions_come_back_as_they_were_written_and_whatever_else_a_model_writes_is_none():
    for action in (Action("look", "the hat"), Action("note", 'A "b" is 7.'), Action("answer", "Yes, it is.")):
        assert read_action(write_action(action)) == action
    others = ("look", "[1]", "null", "[" * 100_000, json.dumps({"act": "note", "text": "a" * 9000}))
    fields = ('"look"', '"look", "text": "x"', '"run", "at": "x"', '["look"], "at": "x"', '"answer", "text": 7')
    more = ('"look", "at": "x", "text": "y"', '"note", "text": ""', '"note", "text": "\\ud800"')
    for reply in (*others, *(f'{{"act": {item}}}' for item in (*fields, *more))):
        with pytest.raises(ValueError, match="action"):
            read_action(reply)
