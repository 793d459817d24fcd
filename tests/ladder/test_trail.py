"""Trails: what stands in them, and what comes out when decisions are made again."""

from dataclasses import replace

import pytest

from sigma0.ladder.budget import Budget, Spending
from sigma0.ladder.trail import Decision, Heading, Spent, Trail, open_trail, read_trail, reason_up, replay
from sigma0.ladder.triggers import Always, Entropy, Hysteresis, Never
from sigma0.signals.verdict import DoorPolicy
from tests.ladder.test_triggers import signs

SURE, UNSURE, DOUBTED = signs().to_dict(), signs(0.9).to_dict(), signs(confidence=0.89).to_dict()
UNKNOWN = signs(None).to_dict()
RUNGS = ({"name": "small"}, {"name": "middle"}, {"name": "large"})


def trail(*lines, unit="answer", policy=None, budget=None, stay=None, doors=None):
    opened = open_trail(unit, RUNGS, policy or Entropy(0.5), budget or Budget(), stay, {"torch": "1"}, doors)
    return Trail([*opened.lines, *lines])


def decided(rung, shown, outcome, position=0, sequence=0, **more):
    return Decision(sequence, position, rung, shown, None, outcome, **more)


def test_a_heading_holds_what_is_decided_by_and_lines_their_sequence():
    (heading,) = trail(
        unit="token", budget=Budget(calls=3), stay=Hysteresis(2, 0.5), doors=DoorPolicy(tau_c=0.25)
    ).lines
    assert heading == Heading(
        "token", RUNGS, {"kind": "entropy", "above": 0.5}, {"calls": 3}, {"stay": 2, "leave": 0.5}, {"torch": "1"},
        heading.doors,
    )  # fmt: skip
    assert DoorPolicy.parse(heading.doors) == DoorPolicy(tau_c=0.25)
    (heading,) = trail().lines
    assert (heading.budget, heading.hysteresis, heading.doors, heading.kind) == ({}, {}, {}, "heading")
    lines = [decided(0, SURE, "accept", sequence=1), Spent(0, "read", Spending(), 0.5), decided(0, SURE, "accept")]
    made = trail(*lines)
    assert made.decisions == [lines[0], lines[2]] and made.decisions_of(1) == [lines[0]]
    assert (lines[1].told, lines[1].kind, lines[0].kind) == ("ok", "spent", "decision")
    assert (lines[0].asked, lines[0].lacking, lines[0].token_id, lines[0].whole) == (None, None, None, False)


def test_a_trail_is_written_and_read_line_by_line(tmp_path):
    made = trail(
        Spent(0, "read 0", Spending(loop_passes=2), 0.5, "timeout"),
        decided(0, UNSURE, "hand_up", asked=Spending(money=0.5), lacking="calls", token_id=3, whole=True),
        unit="token", budget=Budget(seconds=1.5), stay=Hysteresis(1),
    )  # fmt: skip
    path = tmp_path / "trail.jsonl"
    made.write(path)
    assert read_trail(path) == made and path.read_text().count("\n") == 3
    text = made.to_jsonl()
    heading, rest = text.split("\n", 1)
    for wrong, output in (
        *[(wrong, r"trail\.jsonl' does not begin with one heading") for wrong in ("", rest, text + text)],
        (text.replace('"told"', '"tells"'), "line 2"),
        (heading + "\n{", "line 2"),
        (heading + '\n{"kind": "decision", "rung": 1}', "line 2"),
        (heading + '\n{"kind": "other"}', "line 2"),
        (heading + "\n" + rest.replace("{", '{"more": 1, ', 1), "line 2 .*: more"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=output):
            read_trail(path)


def test_a_token_whose_logits_are_no_numbers_goes_up():
    nothing = signs(None, None)
    assert reason_up(Never(), nothing, "token") == "no numbers"
    assert reason_up(Never(), nothing, "answer") is reason_up(Never(), nothing, "draft") is None
    assert reason_up(Always(), replace(nothing, entropy=0.0), "token") == "always"


GOOD = {
    "accepted": [decided(0, SURE, "accept"), decided(0, SURE, "accept", 1)],
    "up and accepted": [decided(0, UNSURE, "hand_up"), decided(1, SURE, "accept")],
    "to the top": [decided(0, UNSURE, "hand_up"), decided(1, UNSURE, "hand_up"), decided(2, UNSURE, "top_rung")],
    "accepted at the top": [decided(0, UNSURE, "hand_up"), decided(1, UNSURE, "hand_up"), decided(2, SURE, "accept")],
    "failed": [decided(0, UNSURE, "hand_up"), decided(1, None, "error"), decided(2, SURE, "accept")],
    "declined": [decided(0, SURE, "decline"), decided(1, SURE, "accept")],
    "no time": [decided(0, UNSURE, "abort", lacking="seconds")],
    "no budget": [
        Spent(0, "write", Spending(loop_passes=6), 1.0), decided(0, UNSURE, "abort", asked=Spending(loop_passes=5)),
    ],
    "just enough": [
        Spent(0, "write", Spending(loop_passes=5), 1.0), decided(0, UNSURE, "hand_up", asked=Spending(loop_passes=5)),
    ],
    "whole": [decided(0, DOUBTED, "hand_up", whole=True), decided(1, SURE, "accept", whole=True)],
}  # fmt: skip
FALSE = {
    "not accepted": ([decided(0, UNSURE, "accept")], ["line 2: hand_up in place of accept"]),
    "not handed up": ([decided(0, SURE, "hand_up")], ["line 2: accept in place of hand_up"]),
    "not the top": ([decided(1, UNSURE, "top_rung")],
                    ["line 2: began at rung 1 in place of 0", "line 2: hand_up in place of top_rung"]),
    "enough": ([decided(0, UNSURE, "abort", asked=Spending(loop_passes=10))], ["line 2: hand_up in place of abort"]),
    "too little": ([decided(0, UNSURE, "hand_up", asked=Spending(loop_passes=11))],
                   ["line 2: abort in place of hand_up"]),
    "began above": ([decided(0, SURE, "accept"), decided(1, SURE, "accept", 1)],
                    ["line 3: began at rung 1 in place of 0"]),
    "the door": ([decided(0, DOUBTED, "accept", whole=True)], ["line 2: hand_up in place of accept"]),
    "another sequence": ([decided(0, UNSURE, "hand_up"), decided(1, SURE, "accept", sequence=1)],
                         ["line 3: began at rung 1 in place of 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_decisions_come_out_again(name):
    assert replay(trail(*GOOD[name], budget=Budget(loop_passes=10, seconds=0.0))) == []
    # thresholds of the door are those of the heading
    line = decided(0, DOUBTED, "accept", whole=True)
    assert replay(trail(line, doors=DoorPolicy(min_confidence=0.8))) == []


@pytest.mark.parametrize("name", FALSE)
def test_what_came_out_otherwise_is_told_by_line(name):
    lines, output = FALSE[name]
    assert replay(trail(*lines, budget=Budget(loop_passes=10))) == output


def tokens(*lines, **stay):
    return replay(trail(*lines, unit="token", stay=Hysteresis(**(stay or {"stay": 1}))))


def test_a_larger_model_stays_in_a_replay_too():
    up = [decided(0, UNSURE, "hand_up"), decided(1, SURE, "accept")]
    assert tokens(*up, decided(1, SURE, "stay", 1), decided(0, SURE, "accept", 2)) == []
    assert tokens(*up, decided(0, SURE, "accept", 1)) == [
        "line 4: began at rung 0 in place of 1", "line 4: stay in place of accept",
    ]  # fmt: skip
    # what goes up from there is no stay any more, and the top one stays in turn
    assert tokens(
        *up, decided(1, UNSURE, "hand_up", 1), decided(2, UNSURE, "top_rung", 1), decided(2, UNSURE, "stay", 2),
        decided(0, SURE, "accept", 3),
    ) == []  # fmt: skip


def test_stays_that_the_budget_refuses_or_keeps_and_unsure_tokens_come_out_again():
    up = [decided(0, UNSURE, "hand_up"), decided(1, SURE, "accept")]
    refused = decided(1, None, "abort", 1, lacking="seconds")
    assert tokens(*up, refused, decided(0, SURE, "accept", 1), decided(0, SURE, "accept", 2)) == []
    assert tokens(*up, replace(refused, lacking=None), decided(0, SURE, "accept", 1)) == [
        "line 4: stay in place of abort"
    ]
    kept = decided(1, UNSURE, "abort", 1, lacking="seconds")
    assert tokens(*up, kept, decided(0, SURE, "accept", 2)) == []
    assert tokens(*up, kept, decided(1, SURE, "stay", 2), stay=2) == []
    up = [decided(0, UNSURE, "hand_up"), decided(1, signs(margin=0.4).to_dict(), "accept")]
    assert tokens(*up, decided(1, SURE, "stay", 1), decided(0, SURE, "accept", 2), leave=0.5) == []
    assert tokens(decided(0, UNKNOWN, "hand_up"), decided(1, SURE, "accept")) == []
    assert replay(trail(decided(0, UNKNOWN, "accept"))) == []
