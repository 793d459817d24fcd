"""Dice beside their stated odds, the micro-world's task beside scripted answers, and the command."""

import json

import pytest

from sigma0.bench.effort import measure as study
from sigma0.bench.pocket.world import draw
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.progressive.policies import FAST_TEST, HYBRID_DEFAULT
from sigma0.reason.progressive.verify_loop import Turn
from sigma0.reason.trail import Trail
from tests.bench.running import bench, refused, reported

NEVER = {"low": 0.0, "medium": 0.0, "high": 0.0}
ALWAYS = {"low": 1.0, "medium": 1.0, "high": 1.0}


def turn(effort):
    return Turn(Desk(Trail()), ScriptedChat([]), "verify", effort, 0.0, 8)


@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_dice_fall_as_stated(level):
    rates = study.Rates(correlation=0.0)
    passed = dict.fromkeys((True, False), 0)
    for seed in range(4000):
        for right in passed:
            passed[right] += study.Dice(rates, seed).verify(turn(level), "right 1" if right else "wrong 1").passed
    reads = 1 - rates.cut_off[level]
    assert passed[True] / 4000 == pytest.approx(reads * (1 - rates.false_fail[level]), abs=0.03)
    assert passed[False] / 4000 == pytest.approx(reads * rates.false_pass[level], abs=0.03)


def test_what_is_overlooked_once_is_overlooked_again():
    stuck = study.Dice(study.Rates(correlation=1.0, cut_off=NEVER), 1)
    for solution in ("wrong 1", "wrong 2", "wrong 3", "right 1"):
        assert len({stuck.verify(turn("low"), solution).passed for _ in range(20)}) == 1
    free = study.Dice(study.Rates(correlation=0.0, cut_off=NEVER), 1)
    assert len({free.verify(turn("low"), "wrong 1").passed for _ in range(20)}) == 2


def test_perfect_verifiers_accept_nothing_wrong_and_blind_ones_everything():
    perfect = study.Rates(false_pass=NEVER, false_fail=NEVER, cut_off=NEVER)
    blind = study.Rates(first_right=0.0, false_pass=ALWAYS, cut_off=NEVER)
    for config in study.POLICIES:
        runs = [study.simulate(config, perfect, seed) for seed in range(40)]
        assert not any(run.accepted and not run.right for run in runs) and any(run.accepted for run in runs)
        assert all(run.accepted and not run.right for run in (study.simulate(config, blind, seed) for seed in range(5)))
    assert study.simulate(study.FLAT_HIGH, blind, 0) == study.Ended(True, False, 5, 2.0 + 5 * 8.0)


def test_a_simulation_is_repeatable_and_its_odds_are_checked():
    assert study.simulate(HYBRID_DEFAULT, study.Rates(), 7) == study.simulate(HYBRID_DEFAULT, study.Rates(), 7)
    for bad in ({"repaired": 1.2}, {"false_pass": {"huge": 0.1}}, {"luck": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            study.Rates(**bad)


def test_runs_are_summed_up():
    runs = [study.Ended(True, True, 5, 2.0), study.Ended(True, False, 7, 4.0), study.Ended(False, True, 9, 6.0)]
    result = study.summarise("x", runs)
    assert result.accepted_right.value == result.accepted_wrong.value == pytest.approx(1 / 3)
    assert result.wrong_of_accepted.value == 0.5 and result.right.value == pytest.approx(2 / 3)
    assert result.verifications.value == 7 and result.cost.value == 4
    assert study.summarise("x", runs[2:]).wrong_of_accepted is None


def test_the_task_asks_what_the_world_can_answer():
    (item,) = study.questions(1, 0)
    subject = item.question.removeprefix("Where is ").removesuffix("?")
    wrong = item.answer.replace(item.key, "moon")
    solver = ScriptedChat([f" {wrong}", item.answer])

    def judge(messages, **_):
        asked = messages[0]["content"].removeprefix(f"{item.story} ")
        place = asked.split(" in the ")[1].removesuffix("?")
        assert asked == f"Is {subject} in the {place}?"
        output = item.answer[0].lower() + item.answer[1:] if " " in subject else item.answer
        return f"Yes, {output}" if place == item.key else f"No, {output}"

    result = study.check(study.FLAT_HIGH, item, solver, ScriptedChat(judge), 0.7, 0)
    assert (result.accepted, result.right, result.first_right, result.verifications) == (True, True, False, 6)
    assert solver.calls[1]["messages"] == solver.calls[0]["messages"]
    assert solver.calls[1]["seed"] != solver.calls[0]["seed"]


@pytest.mark.parametrize("said", ["Yes.", "Yes, it is.", "yes", "No, or Yes, the coin is in the kitchen.", ""])
def test_a_sentence_of_another_form_passes_nothing(said):
    (item,) = study.questions(1, 0)
    task, asked = study.WhereIs(item), Turn(Desk(Trail()), ScriptedChat([said]), "verify", "low", 0.0, 8)
    assert not task.verify(asked, item.answer).passed
    assert not task.verify(asked, "I do not know.").passed


def test_questions_of_another_family_are_refused():
    items = (draw("test", 0, index, questions=1).items[0] for index in range(50))
    with pytest.raises(ValueError, match="no place to verify"):
        study.WhereIs(next(item for item in items if item.family != "where"))


def test_the_command_says_what_is_simulated(tmp_path):
    out = tmp_path / "effort.json"
    assert "SIMULATED" in bench("effort", "-n", 5, "--rates", '{"first_right": 1.0}', "--out", out).stdout
    report = json.loads(out.read_text())
    assert report["kind"] == "simulation" and report["settings"]["rates"]["first_right"] == 1.0
    assert [entry["policy"] for entry in report["policies"]] == [entry.policy for entry in study.POLICIES]
    assert "first_right" in refused("effort", "--rates", '{"first_right": 2}')


@pytest.mark.slow
def test_the_command_runs_the_shipped_models(monkeypatch):
    monkeypatch.setattr("sigma0.bench.effort.measure.POLICIES", (FAST_TEST,))
    report = reported("effort", "--real", "-n", 2, "--verifier", "pocket")
    assert report["kind"] == "measurement" and report["settings"]["verifier"] == "pocket"
    assert all(entry["runs"] == 2 and entry["cost"]["value"] > 0 for entry in report["policies"])
