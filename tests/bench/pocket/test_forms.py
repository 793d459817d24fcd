"""The forms' replies rest on the story alone, and the outer loops reach the known answer by them."""

import json
from random import Random

import pytest
from typer.testing import CliRunner

from sigma0.bench.outer.measure import lemmas, planned, reasoned, verified, walked
from sigma0.bench.pocket import forms
from sigma0.bench.pocket.__main__ import app
from sigma0.bench.pocket.data import encode
from sigma0.bench.pocket.recipe import RECIPES
from sigma0.bench.pocket.world import draw
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.forms import Action, asking, read_action, read_check, sentences, settled
from sigma0.reason.lemma.graph import MAX_LEMMAS, LemmaGraph
from sigma0.reason.lemma.planning import parse_lemmas
from sigma0.reason.progressive.policies import SUCCESS_BASED
from sigma0.reason.trail import Trail

ITEMS = [draw("test", 1, index, questions=1).items[0] for index in range(120)]
SOLVABLE = [item for item in ITEMS if len(forms.solution(item)) <= MAX_LEMMAS]


def taught(item):
    """A model that replies to every form as the forms' own data do."""
    steps = forms.solution(item)
    replies = {item.prompt: item.answer}
    for place in range(len(steps)):
        for asked in (forms.plan_item(item, place), forms.act_item(item, place)):
            replies[asked.prompt] = asked.answer
    for step in steps:
        if step.name:
            replies[forms.look_item(item, step).prompt] = step.statement
    for proposed in (item.answer, *(forms.wrong_answer(item, Random(seed)) for seed in range(9))):
        asked = forms.check_item(item, proposed)
        replies[asked.prompt] = asked.answer
    return ScriptedChat(lambda messages, **_: replies[messages[-1]["content"]])


@pytest.mark.parametrize("way", [planned, reasoned, walked, lemmas, verified(SUCCESS_BASED)])
def test_a_model_that_replies_as_taught_is_right_and_accepted_by_every_loop(way):
    for item in SOLVABLE:
        answered = way(taught(item), Desk(Trail()), item.prompt)
        assert (answered.answer, answered.accepted) == (item.answer, True), item


def test_steps_quote_the_story_or_are_sums_on_what_stands_before_them_and_are_asked_for_in_order():
    totals = 0
    for item in ITEMS:
        steps, reported = forms.solution(item), sentences(item.story)
        acts = [read_action(forms.act_item(item, place).answer) for place in range(len(steps))]
        assert acts[-1] == Action("answer", item.answer) and steps[-1].statement == item.answer
        for place, (step, act) in enumerate(zip(steps, acts, strict=True)):
            assert all(other < place for other in step.depends)
            if step.name:
                assert [one for one in reported if forms.named(one) == step.name][-1] == step.statement
                assert asking(step.name) == step.verify and (act == Action("look", step.name) or step is steps[-1])
            if step.total:
                left, sign, right = step.total.split()
                value = int(left) + int(right) * (1 if sign == "+" else -1)
                assert f" is {value} years old." in step.statement
                assert act == Action("note", step.statement) or step is steps[-1]
                totals += 1
    assert totals > 40


def test_plans_are_graphs_that_the_lemma_parser_takes():
    for item in SOLVABLE:
        steps = forms.solution(item)
        for known in range(len(steps)):
            reply = forms.plan_item(item, known).answer
            result = LemmaGraph(tuple(parse_lemmas(reply))).lemmas
            assert [lemma.statement for lemma in result] == [step.statement for step in steps[known:]]
            assert [lemma.verification_strategy for lemma in result] == [step.verify for step in steps[known:]]
            assert json.loads(reply)["FINAL"]["statement"] == item.answer


def test_checks_agree_with_the_known_answer_alone():
    for number, item in enumerate(ITEMS):
        wrong = forms.wrong_answer(item, Random(number))
        assert wrong != item.answer and len(wrong.split()) == len(item.answer.split())
        for proposed in (item.answer, wrong):
            check = read_check(forms.check_item(item, proposed).answer)
            assert (check.conclusion, check.is_right) == (item.answer, proposed == item.answer)
            assert check.reasons == tuple(step.statement for step in forms.solution(item)[:-1])


def test_known_answers_say_yes_and_no_as_the_rule_has_it():
    binary = [item for item in (draw("test", 8, n, questions=1).items[0] for n in range(400)) if item.binary]
    assert len(binary) > 60 and all(settled(item.question, item.answer) == item.answer for item in binary)


def test_a_share_of_questions_is_asked_in_forms_always_the_same():
    scene = draw("train", 0, 3)
    assert forms.form_scene(scene, "0/3", 0.0) is scene
    assert (
        forms.form_scene(scene, "0/3", 0.8)
        == forms.form_scene(scene, "0/3", 0.8)
        != forms.form_scene(scene, "0/4", 0.8)
    )
    asked = [item for n in range(200) for item in forms.form_scene(draw("train", 0, n), str(n), 0.5).items]
    plain = [item for n in range(200) for item in draw("train", 0, n).items]
    changed = sum(one != other for one, other in zip(asked, plain, strict=True)) / len(plain)
    # a form drawn is the answer itself in one of five
    assert changed == pytest.approx(0.4, abs=0.05)


@pytest.mark.exhaustive
def test_the_forms_pieces_are_one_token_each_leave_other_texts_as_they_were_and_fit_a_row(tokenizer):
    recipe = RECIPES["pocket-solver"]
    current = recipe.tokenizer()
    assert len(current) == len(tokenizer) + len(forms.TOKENS)
    assert all(len(current.encode(piece, add_special_tokens=False)) == 1 for piece in forms.TOKENS)
    for number, item in enumerate(ITEMS):
        assert current.encode(item.prompt) == tokenizer.encode(item.prompt)
        reply = forms.plan_item(item).answer
        assert current.decode(current.encode(reply, add_special_tokens=False)) == reply
        for form in (forms.formed(item, Random(number)), forms.check_item(item, item.answer)):
            assert len(encode(current, [form], chat=True).ids) <= recipe.length


@pytest.mark.exhaustive
def test_the_shipped_solver_knows_its_forms_better_than_pocket():
    reported = {}
    for name in ("pocket-solver", "pocket"):
        result = CliRunner().invoke(app, ["forms", name, "--n", "40", "--json"])
        assert result.exit_code == 0, result.output
        reported[name] = {form: halves["all"] for form, halves in json.loads(result.stdout)["groups"].items()}
    solver, pocket = reported.values()
    assert all(solver[form]["exit"] > pocket[form]["exit"] + 0.1 for form in ("look", "check", "plan", "act"))
    # one look-up, or one step, is learned well; so is what stands at the exits
    assert all(solver[form]["exit"] > 0.8 for form in ("look", "act"))
    assert solver["look"]["exit_depth"] < 4
    table = CliRunner().invoke(app, ["forms", "pocket", "--n", "4"])
    assert table.exit_code == 0 and "look" in table.stdout
