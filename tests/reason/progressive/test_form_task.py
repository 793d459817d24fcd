"""Checks with reasons: what passes, what corrects, and what is no check."""

import pytest

from sigma0.reason.chat import Completion, ScriptedChat
from sigma0.reason.desk import Desk
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.form_task import FormTask
from sigma0.reason.progressive.policies import ProgressiveConfig, Stage
from sigma0.reason.progressive.verify_loop import Turn, VerifyLoop
from sigma0.reason.trail import Trail

PROBLEM = "The hat is with Mary. Mary went to the park. Where is the hat?"
REASONS = "The hat is with Mary. Mary went to the park. So the hat is in the park."


def verify(reply):
    turn = Turn(Desk(Trail()), ScriptedChat([reply]), "verify", "high", 0.0, 64)
    return FormTask(PROBLEM).verify(turn, "The hat is in the barn.")


def test_a_check_passes_by_its_last_word_alone():
    assert verify(f"{REASONS} Yes.").passed
    refused = verify(f"{REASONS} No.")
    assert (refused.passed, refused.report) == (False, "The hat is in the park.")
    for reply in (REASONS, "", Completion(f"{REASONS} Yes.", finish_reason="length")):
        checked = verify(reply)
        assert (checked.passed, checked.report) == (False, None)


def test_what_a_check_concludes_takes_the_place_of_a_wrong_answer():
    chat = ScriptedChat(["The hat is in the barn.", f"{REASONS} No.", f"{REASONS} Yes."])
    manager = ProgressiveReasoningManager(ProgressiveConfig("once", (Stage("low", 1),)))
    report = VerifyLoop(FormTask(PROBLEM), Desk(Trail()), chat, manager=manager, problem=PROBLEM).run()
    assert (report.solved, report.solution) == (True, "The hat is in the park.")
    asked = [call["messages"][-1]["content"] for call in chat.calls]
    assert asked == [PROBLEM, f"{PROBLEM} The hat is in the barn. Right?", f"{PROBLEM} The hat is in the park. Right?"]


def test_a_problem_without_a_question_is_refused():
    with pytest.raises(ValueError, match="question at its end"):
        FormTask("Mary went to the park.")
