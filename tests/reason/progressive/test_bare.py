"""A model that follows no instructions is asked the bare question, and nothing else."""

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
from sigma0.reason.trail import Call, read_lines

PROBLEM = "Mary went to the park. The hat is with Mary. Where is the hat?"


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
