"""Questions of models that follow no instructions: the bare one and nothing else, and checks with reasons."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sigma0.checkpoints import CHECKPOINTS
from sigma0.cli import app
from sigma0.commands.solve_models import follows_instructions
from sigma0.models.ouro_config import OuroConfig
from sigma0.reason import Desk, ProgressiveReasoningManager, ScriptedChat, Trail, VerifyLoop
from sigma0.reason.messages import Completion
from sigma0.reason.progressive.bare import BareQuestion
from sigma0.reason.progressive.form_task import FormTask
from sigma0.reason.progressive.policies import ProgressiveConfig, Stage
from sigma0.reason.progressive.verify_loop import Turn
from sigma0.reason.trail import Call, read_lines

PROBLEM = "The hat is with Mary. Mary went to the park. Where is the hat?"


def run(replies):
    chat = ScriptedChat(replies)
    manager = ProgressiveReasoningManager("FAST_TEST")
    return VerifyLoop(BareQuestion(PROBLEM), Desk(Trail()), chat, manager=manager).run(), chat


def test_an_answer_that_comes_again_passes_and_no_other():
    report, chat = run(lambda **_: " In the  park. ")
    assert report.solved and report.solution == "In the  park."
    assert {asked["messages"][0]["content"] for asked in chat.calls} == {PROBLEM}
    assert {len(asked["messages"]) for asked in chat.calls} == {1}
    assert {asked["effort"] for asked in chat.calls} == {"low", "medium", "high"}
    assert len({asked["seed"] for asked in chat.calls}) == len(chat.calls), "each time with a seed of its own"
    answers = iter(range(1000))
    report, _ = run(lambda **_: f"Number {next(answers)}.")
    assert not report.solved and "limit" in report.why
    report, chat = run(lambda **_: Completion("In the", finish_reason="length"))
    assert not report.solved and report.solution == "In the"
    assert report.status["iteration"] == len(chat.calls) - 1, "one question a verification, none to correct"


@pytest.mark.parametrize("name", ["pocket", "pocket-large"])
def test_the_shipped_checkpoints_say_so_themselves(name):
    assert json.loads((CHECKPOINTS / name / "config.json").read_text())["sigma0_prompts"] == "bare"
    assert OuroConfig().sigma0_prompts == "instructions"
    assert follows_instructions([ScriptedChat(["x"])]), "other models are given instructions"
    with pytest.raises(Exception, match="sigma0_prompts must be instructions or bare, got 'loud'"):
        OuroConfig(sigma0_prompts="loud")


@pytest.mark.slow
def test_the_readme_s_question_is_answered_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[3] / "sigma0" / "reason" / "README.md").read_text()
    line = next(line for line in readme.splitlines() if line.startswith('sigma0 solve "Mary went'))
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0 and result.stdout.startswith("The hat is in the park.\n"), result.stdout
    asked = [item for item in read_lines(tmp_path / "trail.jsonl") if isinstance(item, Call)]
    assert asked[0].answer["text"].strip() == "The hat is in the park."
    assert CliRunner().invoke(app, ["trail", "trail.jsonl"]).exit_code == 0


REASONS = "The hat is with Mary. Mary went to the park. So the hat is in the park."


def verify(reply, solution="The hat is in the park."):
    turn = Turn(Desk(Trail()), ScriptedChat([reply]), "verify", "high", 0.0, 64)
    return FormTask(PROBLEM).verify(turn, solution)


def test_a_check_passes_if_it_concludes_the_same_and_mends_nothing_if_it_was_cut_off():
    assert verify(f"{REASONS} Yes.").passed and verify(f"{REASONS} No.").passed
    refused = verify(f"{REASONS} Yes.", "The hat is in the barn.")
    assert (refused.passed, refused.report) == (False, "The hat is in the park.")
    cut = Completion(f"{REASONS} Yes.", finish_reason="length")
    echo, elsewhere = "So the hat is in the park. Yes.", "Ann is in the barn. So the hat is in the park. Yes."
    for reply in ("", "Yes.", "Mary went to the park. Yes.", cut, echo, elsewhere):
        checked = verify(reply)
        assert (checked.passed, checked.report) == (False, None)


def test_yes_or_no_is_computed_from_the_statements_and_a_question_is_needed():
    problem = "Mary went to the park. Is Mary in the park?"
    turn = Turn(Desk(Trail()), ScriptedChat(["No, Mary is in the park."]), "solve", "low", 0.0, 64)
    assert FormTask(problem).solve(turn) == "Yes, Mary is in the park."
    said = ScriptedChat(["Mary went to the park. So no, Mary is in the park. No."])
    turn = Turn(Desk(Trail()), said, "verify", "low", 0.0, 64)
    assert FormTask(problem).verify(turn, "Yes, Mary is in the park.").passed
    with pytest.raises(ValueError, match="question at its end"):
        FormTask("Mary went to the park.")


def test_what_a_check_concludes_takes_the_place_of_a_wrong_answer():
    chat = ScriptedChat(["The hat is in the barn.", f"{REASONS} No.", f"{REASONS} Yes."])
    manager = ProgressiveReasoningManager(ProgressiveConfig("once", (Stage("low", 1),)))
    report = VerifyLoop(FormTask(PROBLEM), Desk(Trail()), chat, manager=manager, problem=PROBLEM).run()
    assert (report.solved, report.solution) == (True, "The hat is in the park.")
    asked = [call["messages"][-1]["content"] for call in chat.calls]
    assert asked == [PROBLEM, f"{PROBLEM} The hat is in the barn. Right?", f"{PROBLEM} The hat is in the park. Right?"]
