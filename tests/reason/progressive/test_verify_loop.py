"""The loop end to end with scripted models: alone, over levels, crashed and resumed."""

import json
from functools import partial
from unittest.mock import Mock

import pytest

from sigma0.reason.chat import ChatFailed, Completion, ScriptedChat
from sigma0.reason.desk import Desk, Limits
from sigma0.reason.messages import Usage
from sigma0.reason.progressive.critique import Critique
from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.memory import read_memory
from sigma0.reason.progressive.verify_loop import VerifyLoop
from sigma0.reason.trail import Call, Outcome, Trail, read_lines

PROBLEM = "How many legs have two cats?"


def is_label(messages):
    return "one word" in messages[-1]["content"]


def is_verification(messages):
    return "Proposed solution" in messages[-1]["content"]


class Fake:
    """Solutions are numbered; a verification passes if its seed says so. Crashes before its `crash`th question."""

    def __init__(self, passes=lambda seed, effort: True, crash=None):
        self.passes = passes
        self.crash = crash
        self.number = 0

    def __call__(self, messages, effort, seed, **_):
        self.number += 1
        if self.number == self.crash:
            raise ChatFailed("the line is cut")
        if is_label(messages):
            return "PASS" if "no fault" in messages[-2]["content"] else "fail."
        if is_verification(messages):
            good = self.passes(seed, effort)
            return "There is no fault." if good else f"I looked closely. BUG REPORT:\nwrong at {seed % 97}"
        return Completion(f"solution {seed % 1000}", Usage(1, 10, 5))


def loop(chat, memory=None, config="FAST_TEST", limits=None, seed=3, verifier=None, trail=None):
    desk = Desk(trail or Trail(), limits, seed)
    manager = ProgressiveReasoningManager(config)
    return VerifyLoop(Critique(PROBLEM), desk, chat, verifier, manager=manager, memory=memory, problem=PROBLEM)


def test_a_solution_that_stands_is_verified_at_every_level():
    chat = ScriptedChat(Fake())
    result = loop(chat)
    report = result.run()
    assert report.solved and report.why == "3 verifications in a row passed at effort high"
    efforts = [asked["effort"] for asked in chat.calls if is_verification(asked["messages"])]
    assert efforts == ["low"] * 3 + ["medium"] * 2 + ["high"] * 3
    assert chat.calls[0]["effort"] == "low" and PROBLEM in chat.calls[0]["messages"][0]["content"]
    decided = [line.what for line in result.desk.trail.decisions]
    assert decided == ["pass", "pass", "upgrade", "pass", "upgrade", "pass", "pass", "pass"]
    assert isinstance(result.desk.trail.lines[-1], Outcome) and result.desk.trail.lines[-1].solved
    assert report.usage.calls == len(chat.calls) == 1 + 2 * 8
    assert [item["to_level"] for item in report.status["transitions"]] == ["medium", "high"]


def test_each_verification_has_a_seed_of_its_own_and_a_run_is_repeatable():
    first, second = (ScriptedChat(Fake(lambda seed, effort: seed % 3 > 0)) for _ in range(2))
    reports = [loop(chat).run() for chat in (first, second)]
    assert reports[0] == reports[1] and first.calls == second.calls
    seeds = [asked["seed"] for asked in first.calls if is_verification(asked["messages"])]
    assert len(set(seeds)) == len(seeds) > 3
    other = ScriptedChat(Fake(lambda seed, effort: seed % 3 > 0))
    loop(other, seed=4).run()
    assert [asked["seed"] for asked in other.calls] != [asked["seed"] for asked in first.calls]


def test_a_fault_is_corrected_from_the_report_alone():
    verdicts = iter([False, *[True] * 20])
    chat = ScriptedChat(Fake(lambda seed, effort: next(verdicts)))
    report = loop(chat).run()
    (correction,) = [asked for asked in chat.calls if "The faults:" in asked["messages"][0]["content"]]
    text = correction["messages"][0]["content"]
    assert "wrong at" in text and "I looked closely" not in text and PROBLEM in text
    assert correction["effort"] == "low" and len(correction["messages"]) == 1
    assert report.solved and report.solution == f"solution {correction['seed'] % 1000}"


@pytest.mark.parametrize(
    "label", ["It is a PASS", "PASS or FAIL", "pass, I think", "", "PASSED", "The answer is: PASS", "FAIL PASS"]
)
def test_a_text_that_only_holds_a_label_passes_nothing(label):
    def said(messages, label=label, **_):
        return label if is_label(messages) else "There is no fault."

    chat = ScriptedChat(said)
    report = loop(chat).run()
    assert not report.solved and report.status["limit"] == "max_errors"
    assert all(not item["passed"] for item in report.status["recent"])
    # each label is asked for twice, and without a report there is nothing to correct by
    assert report.usage.calls == 1 + 3 * report.status["iteration"]
    for good in ("PASS", "pass", " Pass.\n"):
        assert loop(ScriptedChat(partial(said, label=good))).run().solved


def test_a_verification_that_is_cut_off_passes_nothing():
    def said(messages, **_):
        return Completion("There is no", finish_reason="length") if is_verification(messages) else "PASS"

    result = loop(ScriptedChat(said))
    report = result.run()
    assert not report.solved and (report.status["iteration"], report.status["limit"]) == (8, "max_errors")
    assert all("cut off" in decision.why for decision in result.desk.trail.decisions)
    # nothing is corrected by a report that is not whole: the one solution is all that was written
    assert report.usage.calls == 1 + 8


@pytest.mark.parametrize(
    "limits, why", [(Limits(calls=4), "limit of 4 calls"), (Limits(tokens=9), "limit of 9 tokens")]
)
def test_the_desks_limits_end_a_run_with_what_there_is(limits, why):
    result = loop(ScriptedChat(Fake(lambda seed, effort: False)), limits=limits)
    report = result.run()
    assert why in report.why and not report.solved and report.solution.startswith("solution")
    if limits.calls:
        assert report.usage.calls == limits.calls == sum(isinstance(line, Call) for line in result.desk.trail.lines)


@pytest.mark.parametrize("crash", range(1, 40))
def test_resuming_equals_an_uninterrupted_run(tmp_path, crash):
    """On the same level, after a transition, in the middle of an iteration: wherever it crashed."""

    def passes(seed, effort):
        return seed % 5 > 0

    whole, memory = loop(ScriptedChat(Fake(passes))), tmp_path / "memory.json"
    expected, decisions = whole.run(), []
    try:
        report = loop(ScriptedChat(Fake(passes, crash)), memory).run()
    except ChatFailed:
        again = loop(ScriptedChat(Fake(passes)), memory)
        # a crash ahead of the first solution leaves nothing to resume
        if memory.exists():
            again.resume()
        report, decisions = again.run(), again.desk.trail.decisions
    # nor is a question asked twice, but the one that got no answer
    assert report == expected
    # what was decided after the crash was decided alike
    assert decisions == whole.desk.trail.decisions[len(whole.desk.trail.decisions) - len(decisions) :]


def test_memory_from_before_progressive_states_loads_and_two_models_may_share_the_work(tmp_path):
    memory = tmp_path / "old.json"
    memory.write_text(json.dumps({"problem": PROBLEM, "solution": "eight"}))
    result = loop(ScriptedChat(Fake()), memory, seed=0)
    result.resume()
    report = result.run()
    assert report.solved and report.solution == "eight" and report.status["iteration"] == 8
    assert read_memory(memory).progressive is not None
    solver, verifier = ScriptedChat(["eight"], "small"), ScriptedChat(Fake(), "large")
    assert loop(solver, verifier=verifier).run().solution == "eight"
    assert len(solver.calls) == 1 and len(verifier.calls) == 16


def test_memory_that_does_not_fit_is_refused(tmp_path):
    memory = tmp_path / "memory.json"
    for content, named in (
        ({"problem": "another", "solution": "x"}, "another problem"),
        ({"seed": 9}, "seed 9"),
        ({"pickle": 1}, "pickle"),
        ({"usage": {"gold": 1}}, "gold"),
        ({"usage": {"calls": float("inf")}}, "usage.calls"),
        ({"usage": {"calls": -4}}, "usage.calls"),
        ({"progressive": {"config": 5, "state": {}}}, "progressive config"),
        ({"progressive": {"level": "low"}}, "config and state"),
    ):
        memory.write_text(json.dumps({"problem": PROBLEM, "seed": 3, **content}))
        with pytest.raises(ValueError, match=named):
            loop(ScriptedChat([]), memory).resume()
    memory.write_text("{")
    with pytest.raises(ValueError, match=r"memory\.json"):
        loop(ScriptedChat([]), memory).resume()
    with pytest.raises(ValueError, match="cannot be read"):
        loop(ScriptedChat([]), tmp_path / "none.json").resume()
    with pytest.raises(ValueError, match="name one"):
        loop(ScriptedChat([])).resume()


def test_the_memory_is_replaced_whole(tmp_path, monkeypatch):
    """A writer that dies on the way leaves the file that was there."""
    memory = tmp_path / "memory.json"
    with pytest.raises(ChatFailed):
        loop(ScriptedChat(Fake(crash=4)), memory).run()
    before = memory.read_bytes()
    monkeypatch.setattr("sigma0.reason.progressive.memory.os.fsync", Mock(side_effect=OSError("disk full")))
    again = loop(ScriptedChat(Fake()), memory)
    again.resume()
    with pytest.raises(OSError, match="disk full"):
        again.run()
    assert memory.read_bytes() == before


def test_the_trail_is_written_as_it_comes(path):
    seen = []
    trail = Trail(path, seen.append)
    loop(ScriptedChat(Fake()), trail=trail).run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(seen) == len(trail.lines) and lines[-1]["kind"] == "outcome"
    with pytest.raises(ValueError, match="heading"):
        read_lines(path)
