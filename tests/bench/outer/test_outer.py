"""Ways of asking beside scripted answers, sums and comparisons, the command; toy repositories that fail their tests."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from sigma0.bench.core.conditions import Conditions
from sigma0.bench.core.ledger import read_rows
from sigma0.bench.outer import measure as outer
from sigma0.bench.outer.command import PLAIN, RISING, _by_lot, choose, loops
from sigma0.bench.outer.program import Kind, Pointer, Program, Trace, fill, induce, match
from sigma0.bench.outer.toy import FAULTS, TOYS, is_held_out, planted, write
from sigma0.bench.pocket.forms import plan_text, solution, wrong_answer
from sigma0.bench.pocket.world import draw
from sigma0.checkpoints import resolve_model
from sigma0.reason.agent import choices
from sigma0.reason.chat import Completion, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.lemma.graph import MAX_LEMMAS
from sigma0.reason.lemma.planning import parse_lemmas
from sigma0.reason.messages import Usage
from sigma0.reason.trail import Trail
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.running import bench, refused

PROBLEM = "The hat is with Mary. Mary went to the park. Where is the hat?"
IN_PARK, IN_BARN = "The hat is in the park.", "The hat is in the barn."
USED = Usage(calls=2, completion_tokens=5, loop_passes=7, seconds=0.5)


def ask(way, replies):
    return way(ScriptedChat(replies), Desk(Trail()), PROBLEM)


def row_of(results, beside={}, weight=1.0, loops=6):  # noqa: B006
    conditions = Conditions.model_validate({**CONDITIONS, "total_loops": loops})
    return outer.to_row("way", outer.MeasuredModel(ScriptedChat([]), conditions, weight), results, beside, 0, "now")


def test_a_vote_is_won_by_the_commonest_answer_and_of_several_by_the_first():
    assert outer.vote(["a", "b", "b"], PROBLEM, False) == "b"
    assert outer.vote(["b", "a", "a", "b"], PROBLEM, False) == "b"
    said = ["Yes, the hat is in the barn.", "No, the hat is in the barn.", "Yes, the hat is in the park."]
    asked = "The hat is in the barn. Is the hat in the park?"
    assert (outer.vote(said, asked, False), outer.vote(said, asked, True)) == (said[0], said[1])


def test_the_answers_of_a_vote_are_drawn_with_seeds_of_their_own_and_its_cost_is_theirs():
    items = outer.hard_questions(2, 3)
    chat = ScriptedChat(lambda **_: Completion("a", USED))
    drawn = [outer.run(outer.sampled(number), chat, items, 0, lambda: None) for number in range(3)]
    assert len({call["seed"] for call in chat.calls}) == 6 and {call["temperature"] for call in chat.calls} == {0.7}
    results = outer.run_vote(items, drawn, by_rule=False)
    assert [(one.answer, one.usage.calls, one.usage.loop_passes) for one in results] == [("a", 3, 21)] * 2


def test_what_cannot_be_read_is_no_answer_and_is_not_accepted():
    for way, reply in (
        (outer.planned, "no plan"),
        (outer.walked, "no action"),
        (outer.walked, '{"act": "look", "at": "Ann"}'),
    ):
        answered = ask(way, [reply, "Ann is on the moon."])
        assert (answered.answer, answered.accepted) == ("", False)
    endless = ask(outer.walked, ['{"act": "note", "text": "A."}'] * 20)
    assert (endless.answer, endless.accepted) == ("", False)


def test_one_check_corrects_or_confirms():
    check = "Mary went to the park. So the hat is in the park. No."
    assert ask(outer.reasoned, [IN_PARK, check]).accepted
    corrected = ask(outer.reasoned, ["The hat is in the barn.", check])
    assert (corrected.answer, corrected.accepted) == (IN_PARK, False)


def test_a_verdict_or_what_was_learned_decides_whether_to_walk():
    walk = ['{"act": "answer", "text": "Walked."}']
    for door, calls, answer in (("converge", 1, "Plain."), ("escalate", 2, "Walked."), (None, 2, "Walked.")):
        chat = ScriptedChat([Completion("Plain.", door=door), *walk])
        assert outer.routed(outer.walked)(chat, Desk(Trail()), PROBLEM).answer == answer and len(chat.calls) == calls
    (item,) = outer.hard_questions(1, 0)
    items = [replace(item, question=PROBLEM, answer="Right.", key="Right", trail=())] * 14
    said = ["Right."] * 9 + ["Wrong."] + walk * 4
    results = outer.run(outer.Learned(outer.walked), ScriptedChat(said), items, 0, lambda: None)
    # nine of ten were right, which is not enough
    assert [one.answer for one in results] == ["Right."] * 9 + ["Wrong."] + ["Walked."] * 4


def test_rising_effort_says_how_many_reached_and_passed_each_level():
    def says(place, verdict):
        return f"Mary went to the park. So the hat is in the {place}. {verdict}."

    park, barn = says("park", "Yes"), says("barn", "No")
    # one passes at every level but for a doubt at medium, the other never passes
    replies = ([IN_PARK, park, barn, barn, barn], [IN_PARK, *[barn, park] * 5])
    checked = [ask(outer.verified(RISING), entry) for entry in replies]
    assert [(one.answer, one.accepted) for one in checked] == [(IN_BARN, True), (IN_BARN, False)]
    row = row_of(checked)
    result = {
        level: (rates.reached, rates.passed.value, rates.checks, rates.checks_passed.value)
        for level, rates in row.levels.items()
    }
    assert result == {"low": (2, 0.5, 11, 1 / 11), "medium": (1, 1.0, 2, 0.5), "high": (1, 1.0, 1, 1.0)}
    cells = outer.levels_table([row]).rows
    assert cells[0][:5] == ["way", "low", "2", "50.0 (1.3 to 98.7)", "5.5"] and len(cells) == 3
    assert not outer.levels_table([row.model_copy(update={"levels": {}})]).rows


def test_questions_are_of_the_hard_half_and_always_the_same():
    items = outer.hard_questions(12, 3)
    assert items == outer.hard_questions(12, 3) and all(item.difficulty >= 4 for item in items)
    right = [Completion(item.answer, USED) for item in items]
    results = outer.run(outer.plain(), ScriptedChat(right), items, 0, lambda: None)
    assert all(one.right for one in results) and {one.usage.loop_passes for one in results} == {7}


def test_rows_count_the_passes_over_prompts():
    results = [
        outer.Answered("a", True, right=True, usage=USED),
        outer.Answered("b", True, usage=replace(USED, loop_passes=9)),
    ]
    row = row_of(results, weight=1.5)
    assert (row.passes.value, row.cost) == (8 + 2 * 6, 30.0)
    assert (row.right.value, row.accepted_wrong.value, row.accepted.value) == (0.5, 0.5, 1.0)
    assert (row.completion_tokens, row.seconds, row.calls) == (5, 0.5, 2)
    # without loops a pass for each token written, and one over each prompt
    assert row_of(results, loops=1).passes.value == row_of(results, loops=1).cost == 5 + 2


def test_ways_are_compared_on_the_same_questions():
    one, other = outer.Answered("a", True, right=True), outer.Answered("b", True)
    row = row_of([one] * 8 + [other] * 2, {"worse": [other] * 10})
    assert row.beats["worse"].value == pytest.approx(0.8) and row.beats["worse"].low > 0.4
    assert row.p_values["worse"] == pytest.approx(2 / 2**8)
    with pytest.raises(ValueError, match="zip"):
        outer.difference([one], [other] * 2)


@pytest.mark.exhaustive
def test_the_command_runs_every_way_and_writes_what_it_found(ledger):
    line = ("outer", "pocket", "--larger", "pocket-large", "-n", 2, "--most-votes", 9, "--out", ledger)
    result = bench(*line, "--json")
    rows = read_rows(ledger)
    assert [row.model_dump(mode="json") for row in rows] == list(map(json.loads, result.stdout.splitlines()))
    ways = {row.way: row for row in rows}
    # pocket knows no form: no loop that reads one accepts anything
    assert {PLAIN, "pocket-large: plain answer", *loops()} <= set(ways)
    assert ways["lemma graph"].accepted.value == ways["walk"].accepted.value == 0
    assert all(row.passes.value > 0 and row.n == 2 for row in rows)
    for name in loops():
        votes = [other for other in ways[name].beats if other != PLAIN]
        assert len(votes) == 2 and votes[1] == f"{votes[0]}, yes or no by rule"
        assert ways[votes[0]].cost >= ways[name].cost or votes[0] == "vote of 9, which costs less"
    older = [row.model_copy(update={"time": "before"}) for row in rows]
    other = rows[0].model_copy(update={"time": "z", "way": "program of 3"})
    assert {name for name, row in ways.items() if row.levels} == {name for name in loops() if name.startswith("effort")}
    assert outer.latest_outer([*older, *rows, other]) == [rows, [other]] and len(outer.table(rows).rows) == len(rows)


@pytest.mark.slow
def test_of_a_folder_rows_have_the_name_alone(tmp_path, ledger):
    folder = tmp_path / "somewhere" / "mine"
    shutil.copytree(resolve_model("pocket"), folder)
    line = ("outer", folder, "-n", 2, "--most-votes", 1, "--ways", "plan, unchecked", "--out", ledger)
    bench(*line)
    rows = read_rows(ledger)
    assert {row.model for row in rows} == {"mine", "pocket-large"} and str(tmp_path) not in ledger.read_text()
    assert "have one name" in refused(*line, "--larger", folder.parent / ".." / "somewhere" / "mine")
    assert read_rows(ledger) == rows


def test_some_loops_are_chosen_by_name():
    assert list(choose("walk; plan, unchecked")) == ["walk", "plan, unchecked"] and list(choose("")) == list(loops())
    with pytest.raises(ValueError, match="no such loop: 'run'; there are plan, unchecked; check"):
        choose("walk;run")


def passes(folder):
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    return subprocess.run(line, cwd=folder, capture_output=True, timeout=120).returncode == 0


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: "none" if fault is None else fault.name)
def test_its_tests_pass_without_a_fault_and_fail_with_each(fault, tmp_path):
    write(tmp_path, fault)
    assert passes(tmp_path) == (fault is None)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_command_counts_what_was_mended(ledger):
    result = bench("agent", "pocket", "--steps", 4, "--max-tokens", 16, "--out", ledger)
    assert f"0 of {len(FAULTS)} faults mended" in result.output
    row = json.loads(ledger.read_text())
    assert (row["n"], row["right"]["value"], row["way"]) == (len(FAULTS), 0, "agent, held to actions, 4 steps")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_arms_of_the_agent_stand_beside_each_other(ledger):
    line = ("agent", "pocket-large", "--steps", 8, "--toys", 4, "--out", ledger)
    output = bench(*line, "--tiers", "chance,0,3").output
    rows = read_rows(ledger)
    assert [row.way for row in rows] == [f"agent, {arm}" for arm in ("chance, 8 steps", *ACTING)]
    assert [list(row.beats) for row in rows] == [[], [rows[0].way], [rows[0].way, rows[1].way]]
    assert rows[2].beats[rows[1].way].value == rows[2].right.value - rows[1].right.value
    assert all(f"{row.way}: {round(4 * row.right.value)} of 4 faults mended" in output for row in rows)
    assert outer.latest_outer(rows) == [rows]
    assert "each once, got '0,4'" in refused(*line, "--tiers", "0,4")
    assert "give --toys" in refused("agent", "pocket-large", "--tiers", "chance", "--out", ledger)


ACTING = ("choices, 8 steps, 0 tiers", "choices, 8 steps")


def test_every_change_of_a_toy_is_seen_by_its_test_and_can_be_taken_back():
    def result(toy, returns, given):
        return repr(eval(f"(lambda {toy.takes}: {returns})({given})"))

    lines = []
    for toy in (toy for toys in TOYS.values() for toy in toys):
        assert all(result(toy, toy.returns, given) == expected for given, expected in toy.calls)
        for edit in choices.edits_of("a.py", toy.line):
            returns = edit.new.partition("return ")[2]
            assert any(result(toy, returns, given) != expected for given, expected in toy.calls), edit.new
            assert toy.line in [back.new for back in choices.edits_of("a.py", edit.new)]
            lines.append(edit.new)
    assert 8 <= sum(map(is_held_out, lines)) <= len(lines) // 3 and len(lines) == 44


def test_drawn_repositories_hold_one_fault_of_their_kind():
    for held_out in (True, False):
        for index in range(40):
            toys = planted(0, index, held_out)
            assert is_held_out(toys.mend.old) == held_out and toys.mend.new == toys.toy.line
            assert toys.files[toys.mend.path].count(toys.mend.old) == 1 and toys.toy.line in toys.mended
            assert toys == planted(0, index, held_out) != planted(0, index + 1, held_out)
            tests = toys.files[f"test_{toys.mend.path}"]
            assert f"test_{toys.toy.name}()" in tests and f"import {toys.toy.name}" in tests.replace(", ", "\nimport ")


def test_chance_chooses_among_the_listed_actions():
    listed = choices.actions(["a.py"], ("a.py", "def add(a, b): return a + b\n"))
    reply = _by_lot(random.Random(0))
    drawn = {reply(messages=[], grammar=choices.choice_grammar(listed)) for _ in range(200)}
    assert drawn == {choices.written(action) for action in listed} and len(listed) == 7


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
