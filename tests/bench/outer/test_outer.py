"""Ways of asking beside scripted answers, their sums and comparisons, and the command with a tiny model."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from sigma0.bench.__main__ import app
from sigma0.bench.outer.measure import Result, difference, hard_questions, run, summarise
from sigma0.bench.outer.ways import plain, planned, reasoned, voted, walked
from sigma0.reason.chat import Completion, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.messages import Usage
from sigma0.reason.trail import Trail

PROBLEM = "The hat is with Mary. Mary went to the park. Where is the hat?"
IN_PARK = "The hat is in the park."
USED = Usage(calls=2, completion_tokens=5, loop_passes=7, seconds=0.5)


def ask(way, replies):
    return way(ScriptedChat(replies), Desk(Trail()), PROBLEM)


def test_a_vote_is_won_by_the_commonest_answer_and_of_several_by_the_first():
    assert ask(voted(3), ["a", "b", "b"]).answer == "b"
    assert ask(voted(4), ["b", "a", "a", "b"]).answer == "b"
    chat = ScriptedChat(["a"] * 3)
    voted(3)(chat, Desk(Trail()), PROBLEM)
    assert len({call["seed"] for call in chat.calls}) == 3 and {call["temperature"] for call in chat.calls} == {0.7}


def test_what_cannot_be_read_is_no_answer_and_is_not_accepted():
    for way, reply in ((planned, "no plan"), (walked, "no action"), (walked, '{"act": "look", "at": "Ann"}')):
        answered = ask(way, [reply, "Ann is on the moon."])
        assert (answered.answer, answered.accepted) == ("", False)
    endless = ask(walked, ['{"act": "note", "text": "A."}'] * 20)
    assert (endless.answer, endless.accepted) == ("", False)


def test_one_check_corrects_or_confirms():
    checks = [f"Mary went to the park. So the hat is in the park. {label}" for label in ("Yes.", "No.")]
    assert ask(reasoned, [IN_PARK, checks[0]]).accepted
    corrected = ask(reasoned, ["The hat is in the barn.", checks[1]])
    assert (corrected.answer, corrected.accepted) == (IN_PARK, False)


def test_questions_are_of_the_hard_half_and_always_the_same():
    items = hard_questions(12, 3)
    assert items == hard_questions(12, 3) and all(item.difficulty >= 4 for item in items)
    right = [Completion(item.answer, USED) for item in items]
    results = run(plain(), ScriptedChat(right), items, 0, lambda: None)
    assert all(one.right for one in results) and {one.usage.loop_passes for one in results} == {7}


def test_sums_count_the_passes_over_prompts():
    results = [Result("a", True, True, USED), Result("b", False, True, replace(USED, loop_passes=9))]
    summary = summarise("way", "model", results, loops=6, weight=1.5)
    assert (summary.passes.value, summary.cost) == (8 + 2 * 6, 30.0)
    assert (summary.right.value, summary.accepted_wrong.value, summary.accepted.value) == (0.5, 0.5, 1.0)
    assert (summary.tokens, summary.seconds, summary.calls) == (5, 0.5, 2)


def test_ways_are_compared_on_the_same_questions():
    one, other = Result("a", True, True, USED), Result("b", False, True, USED)
    found = difference(("x", "y"), [one] * 8 + [other] * 2, [other] * 10)
    assert found.points.value == pytest.approx(0.8) and found.points.interval[0] > 0.4
    assert found.p == pytest.approx(2 / 2**8)
    with pytest.raises(ValueError, match="zip"):
        difference(("x", "y"), [one], [other] * 2)


def test_the_command_runs_every_way_and_writes_what_it_found(tmp_path):
    out = tmp_path / "outer.json"
    line = ["outer", "pocket", "--larger", "pocket-large", "-n", "2", "--out", str(out), "--json"]
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 0, found.output
    told = json.loads(out.read_text())
    assert json.loads(found.stdout) == told
    ways = {way["way"]: way for way in told["ways"]}
    # pocket knows no form: no loop that reads one accepts anything
    assert {"plain answer", "lemma graph", "walk", "pocket-large, plain answer"} <= set(ways)
    assert ways["lemma graph"]["accepted"]["value"] == ways["walk"]["accepted"]["value"] == 0
    assert all(way["passes"]["value"] > 0 and way["n"] == 2 for way in ways.values())
    assert {one["second"] for one in told["differences"]} >= {"plain answer"}
