"""Plans whose steps are asked for again: what stands, what is planned anew, and what ends a run."""

import json

import pytest

from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk, Limits
from sigma0.reason.lemma.form_solver import FormSolver
from sigma0.reason.lemma.settings import LemmaSettings
from sigma0.reason.trail import Trail

STORY = "The hat is with Mary. Ann is in the barn. Mary went to the park."
PROBLEM = f"{STORY} Where is the hat?"
LOOKS = {
    "What is told of the hat?": "The hat is with Mary.",
    "What is told of Mary?": "Mary went to the park.",
    "What is told of Ann?": "Ann is in the barn.",
}
ANSWER = {"act": "answer", "text": "The hat is in the park."}


def plan(*lemmas, final="The hat is in the park.", **more):
    """JSON of look-ups (name, sentence) and an answer."""
    made = {
        f"L{number}": {"verify": f"What is told of {name}?", "statement": sentence}
        for number, (name, sentence) in enumerate(lemmas, 1)
    }
    final_lemma = {"statement": final, "depends": ", ".join(made), **more}
    return json.dumps({**made, "FINAL": {key: value for key, value in final_lemma.items() if value}})


HAT, MARY = ("the hat", "The hat is with Mary."), ("Mary", "Mary went to the park.")


def solve(plans, looks=LOOKS, actions=(), limits=None, settings=None, problem=PROBLEM):
    """A run, and what was asked: plans and actions come in turn, look-ups by their question."""
    plans, actions = iter(plans), iter(actions)

    def reply(messages, **_):
        text = messages[-1]["content"]
        if text.endswith("Plan."):
            return next(plans)
        if text.endswith("Next?"):
            return json.dumps(next(actions, ANSWER))
        question = text.removeprefix(STORY).strip()
        obtained = looks[question]
        return obtained if isinstance(obtained, str) else next(obtained)

    trail = Trail()
    chat = ScriptedChat(reply)
    result = FormSolver(chat, Desk(trail, limits), settings).solve(problem)
    return result, [call["messages"][-1]["content"].removeprefix(f"{STORY} ") for call in chat.calls]


def test_a_plan_whose_steps_come_again_is_verified_and_a_wrong_lemma_is_replaced():
    result, asked = solve([plan(HAT, MARY)])
    assert (result.answer, result.verified, result.best_guess) == ("The hat is in the park.", True, None)
    assert asked == [
        "Where is the hat? Plan.",
        "What is told of the hat?",
        "What is told of Mary?",
        "Where is the hat? The hat is with Mary. Mary went to the park. Next?",
    ]
    assert [lemma.id for lemma in result.graph.lemmas] == ["L1", "L2", "FINAL"]
    assert {lemma.status for lemma in result.graph.lemmas} == {"verified"}
    assert result.usage.calls == 4
    wrong = plan(HAT, ("Mary", "Ann is in the barn."), final="The hat is in the barn.")
    result, asked = solve([wrong, plan()])
    assert result.answer == "The hat is in the park." and result.verified
    # the second look-up, at high effort, decides
    assert asked.count("What is told of Mary?") == 2
    assert "Where is the hat? The hat is with Mary. Mary went to the park. Plan." in asked
    assert [lemma.statement for lemma in result.graph.lemmas][1] == "Mary went to the park."


def test_what_the_text_does_not_hold_or_nobody_named_never_stands():
    invented = {**LOOKS, "What is told of Mary?": "Mary went to the moon."}
    result, _ = solve([plan(HAT, ("Mary", "Mary went to the moon."))] * 4, looks=invented)
    assert not result.verified and result.answer is None
    assert result.best_guess == "The hat is in the park." and "not in the text" in result.why
    result, asked = solve([plan(("Ann", "Ann is in the barn."), final="The hat is in the barn.")] * 4)
    assert not result.verified and "asks about nothing" in result.why and "What is told of Ann?" not in asked


def test_the_answer_must_follow_when_it_is_asked_for_alone():
    other = {"act": "answer", "text": "The hat is in the barn."}
    look = {"act": "look", "at": "Ann"}
    for actions, why in (([other] * 4, "the answer is 'The hat is in the barn.'"), ([look] * 4, "to look")):
        result, _ = solve([plan(HAT, MARY), *[plan()] * 3], actions=actions)
        assert not result.verified and why in result.why


@pytest.mark.parametrize(
    ("lemmas", "why"),
    [
        ({"FINAL": {"verify": "What is told of the hat?", "statement": HAT[1]}}, "nothing was looked up"),
        ({"L1": {"verify": "Who is it that never went to the?", "statement": HAT[1]}}, "neither a look-up"),
        ({"L1": {"statement": "Ann is 99 years old."}}, "neither a look-up nor a sum"),
        ({"L1": {"verify": "What is told of the hat? Mary?", "statement": HAT[1]}}, "neither a look-up"),
    ],
)
def test_what_is_neither_look_up_nor_sum_never_stands(lemmas, why):
    ends = {"statement": "The hat is in the barn.", "depends": ", ".join(lemmas)}
    text = json.dumps(lemmas if "FINAL" in lemmas else {**lemmas, "FINAL": ends})
    result, _ = solve([text] * 4)
    assert not result.verified and result.answer is None and why in result.why


def test_the_answer_is_the_last_of_a_plan_and_follows_from_something():
    look = {"verify": "What is told of the hat?", "statement": "The hat is with Mary."}
    first = json.dumps({"FINAL": {"statement": "The hat is in the park.", "depends": "L1"}, "L1": look})
    result, asked = solve([first, plan(HAT, MARY)])
    assert result.verified and len([item for item in asked if item.endswith("Plan.")]) == 2
    result, _ = solve([plan()] * 4)
    assert not result.verified and "nothing was looked up" in result.why


AGES = "Ann is 2 years old. Tom is 3 years older than Ann. Lea is as old as Tom. How old is Lea?"
TOLD, TOM, LEA = "Lea is as old as Tom.", "Tom is 5 years old.", "Lea is 5 years old."


def add(total, alone, tom=TOM):
    """A plan of a look-up, a sum and the answer; what stands of it after the look-up, which always does."""
    look, ends = {"verify": "What is told of Lea?", "statement": TOLD}, {"statement": LEA, "depends": "L2"}
    text = json.dumps({"L1": look, "L2": {"verify": total, "statement": tom, "depends": "L1"}, "FINAL": ends})
    rest = json.dumps({"FINAL": {"statement": LEA}})
    act, answer = json.dumps(alone), json.dumps({"act": "answer", "text": LEA})
    settings = LemmaSettings(repairs=1, restructures=0)
    replies = {"Plan.": iter((text, rest)), "Next?": iter((act, answer, answer)), "Lea?": iter((TOLD,))}
    chat = ScriptedChat(lambda messages, **_: next(replies[messages[-1]["content"].split()[-1]]))
    result = FormSolver(chat, Desk(Trail()), settings).solve(AGES)
    return result, [] if result.graph is None else [lemma.statement for lemma in result.graph.lemmas][1:]


def note(text):
    return {"act": "note", "text": text}


def test_of_plan_sum_and_step_alone_two_have_to_agree_the_step_among_them():
    # all three; plan and step; sum and step, which takes the lemma's place
    assert add("2 + 3", note(TOM))[1] == [TOM, LEA]
    assert add("2 - 3", note(TOM))[1] == [TOM, LEA]
    assert add("2 + 3", note(TOM), tom="Tom is 6 years old.")[1] == [TOM, LEA]
    # plan and sum without the step, and none
    for total, alone, tom in (("2 + 3", note("Tom is 6 years old."), TOM), ("2 + 2", note("Tom is 9 years old."), TOM)):
        result, statements = add(total, alone, tom)
        assert statements in ([], [LEA]) and TOM not in statements, result
    result, statements = add("2 + 3", {"act": "answer", "text": LEA})
    assert statements == [LEA] and result.answer == LEA
    result, statements = add("2 + 3", {"act": "answer", "text": "Lea is 7 years old."})
    assert "Lea is 7 years old." not in statements


def test_bad_plans_limits_and_problems_end_a_run_with_a_reason():
    settings = LemmaSettings(repairs=1, restructures=0)
    result, asked = solve(["no plan"] * 2, settings=settings)
    assert (result.verified, result.best_guess, result.graph) == (False, None, None)
    assert "no plan" in result.why and len(asked) == 2
    result, asked = solve([plan(HAT, MARY)], limits=Limits(calls=2))
    assert not result.verified and "limit of 2 calls" in result.why and len(asked) == 2
    assert result.best_guess == "The hat is in the park."
    for bad, why in (("Where is the hat?", "question at its end"), (f"{STORY * 200} Where?", "at most 8000")):
        with pytest.raises(ValueError, match=why):
            solve([], problem=bad)
