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
