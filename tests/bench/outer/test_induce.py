"""Programs made of traces answer what the traces' model would, and nothing else."""

import json
from dataclasses import replace
from random import Random

import pytest

from sigma0.bench.outer.program import Kind, Pointer, Program, Trace, fill, induce, match
from sigma0.bench.pocket.forms import plan_text, solution, wrong_answer
from sigma0.bench.pocket.world import draw
from sigma0.reason.lemma.graph import MAX_LEMMAS
from sigma0.reason.lemma.planning import parse_lemmas
from tests.bench.running import bench


def traces(n, seed=4):
    items = (draw("train", seed, index, questions=1).items[0] for index in range(n))
    plans = ((item.prompt, solution(item)) for item in items)
    return [Trace(text, tuple(parse_lemmas(plan_text(plan)))) for text, plan in plans if len(plan) <= MAX_LEMMAS]


def scores(program, n=300):
    items = [draw("test", 6, index, questions=1).items[0] for index in range(n)]
    answers = [program.answer(item.prompt) for item in items]
    right = sum(answer == item.answer for answer, item in zip(answers, items, strict=True))
    return right, sum(answer is not None for answer in answers) - right, answers.count(None)


def test_the_whole_world_is_in_four_hundred_traces():
    program = induce(traces(400))
    assert scores(program) == (300, 0, 0)
    assert Pointer("{x} is {n} years younger than {y}.", -1) in program.pointers
    assert Pointer("{x} was left in the {y}.", 0) in program.pointers


def test_a_few_wrong_traces_do_no_harm():
    rng = Random(0)
    items = {item.prompt: item for index in range(20) for item in draw("train", 4, index, questions=1).items}
    spoiled = []
    for problem, (*lemmas, final) in traces(20):
        wrong = replace(final, statement=wrong_answer(items[problem], rng))
        spoiled.append(Trace(problem, (*lemmas, wrong)))
    right, wrong, _ = scores(induce([*traces(400), *spoiled]))
    assert right >= 295 and wrong <= 5


def test_what_the_traces_do_not_hold_is_not_answered():
    program = induce(trace for trace in traces(200) if "old" not in trace.problem)
    right, wrong, none = scores(program)
    assert wrong == 0 and none > 40 and right + none == 300
    assert induce([]) == Program((), ()) and Program((), ()).answer("A is in the box. Where is A?") is None


def test_circles_and_loose_ends_have_no_answer():
    kind = Kind("Where is {x}?", "open", ("{x} went to the {y}.",), "{x} is in the {y}.")
    program = Program((Pointer("{x} is in {y}."), Pointer("{x} went to the {y}.")), (kind,))
    assert program.answer("The cup is in Box. Box went to the barn. Where is the cup?") == "The cup is in the barn."
    assert program.answer("The cup is in the box. The box is in the cup. Where is the cup?") is None
    assert program.answer("The cup is in the box. Where is the cup?") is None
    assert program.answer("The cup is in the box. Who is it?") is None
    with pytest.raises(ValueError, match="question at its end"):
        program.answer("The cup is in the box.")


def test_templates_match_whole_texts_and_are_filled_as_sentences():
    assert match("{x} is {n} years old.", "Ann is 12 years old.") == {"x": "Ann", "n": "12"}
    for text in ("Ann is old.", "Ann is 1 years old. Yes.", "An(n is 1 years old."):
        assert match("{x} is {n} years old.", text) is None
    assert fill("{x} is in the {y}.", {"x": "the cup", "y": "barn"}) == "The cup is in the barn."


def test_the_command_makes_a_program_of_what_was_verified(tmp_path, ledger):
    program = tmp_path / "program.json"
    result = bench("distill", "pocket", "--seen", 2, "-n", 2, "--program", program, "--out", ledger)
    # pocket plans nothing: nothing is verified, and nothing is answered
    assert "0 of 2 questions verified" in result.output
    assert json.loads(program.read_text()) == {"pointers": [], "kinds": []}
    assert json.loads(ledger.read_text())["accepted"]["value"] == 0
