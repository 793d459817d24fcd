"""The loop end to end with scripted models: who is asked what, what is done about it, and what comes out."""

import json
import shutil
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sigma0.reason.agent.actions import action_grammar
from sigma0.reason.agent.agent import WARNED_TOOLS, AgentSettings, RepoAgent
from sigma0.reason.agent.escalation import ThreeTierEscalation
from sigma0.reason.agent.workspace import Workspace
from sigma0.reason.chat import ScriptedChat
from sigma0.reason.desk import Desk, Limits
from sigma0.reason.sandbox.sandbox import SandboxUnavailable
from sigma0.reason.trail import Call, Run, Trail
from tests.reason.agent.repositories import (
    BREAK,
    FINISH,
    FIX,
    FIXED,
    HALF_FIX,
    RUN,
    TOOLS,
    PlainRunner,
    ReadingRunner,
    applied,
    contents,
    planted,
    pytest_output,
    result,
    said,
)

LIST = {"action": "list"}
READ = {"action": "read", "path": "numbers_kit/ranges.py"}
USELESS = {"action": "edit", "path": "notes.txt", "old": "", "new": "The bug is elsewhere."}
TASK = "Repair clamp."


@pytest.fixture
def source(tmp_path):
    return planted(tmp_path / "source")


@pytest.fixture
def trail():
    return Trail()


class Stubborn:
    """Does `useless` again and again, until a measure was taken; then what is good for it."""

    def __init__(self, trail, measure, useless, good):
        self.trail, self.measure, self.useless, self.good = trail, measure, useless, iter(good)
        self.turns = 0

    def __call__(self, messages, **_):
        if "Write the plan" in messages[-1]["content"]:
            return "1. Look."
        if self.measure in decided(self.trail):
            return said(next(self.good))
        self.turns += 1
        return said(self.useless[(self.turns - 1) % len(self.useless)])


def decided(trail):
    return [decision.what for decision in trail.decisions]


def measures(trail):
    wanted = ("replan", "warn", "reset", "lower")
    return [(line.what, line.state.get("tier")) for line in trail.decisions if line.what in wanted]


def solve(source, trail, *models, runner=None, limits=None, **changes):
    settings = AgentSettings.from_dict(changes)
    return RepoAgent(models, runner or ReadingRunner(), Desk(trail, limits), settings).solve(TASK, source)


def scripted(*actions, plans=("1. Look.",)):
    return ScriptedChat([*plans, *(action if isinstance(action, str) else said(action) for action in actions)])


def test_a_bug_is_fixed_in_a_few_steps(source, trail):
    before = contents(source)
    model = scripted(READ, FIX, RUN, FINISH)
    obtained = solve(source, trail, model)
    assert obtained.solved and obtained.steps == 4 and obtained.tier_reached == 0 and obtained.failed is None
    assert obtained.usage.calls == 5
    assert obtained.report.ok and len(obtained.report.passed) == 3
    assert "+    return max(low, min(value, high))" in obtained.patch
    assert contents(source) == before
    calls = [line.purpose for line in trail.lines if isinstance(line, Call)]
    assert calls == ["plan 1", *(f"step {number}" for number in range(1, 5))]
    assert [line.purpose for line in trail.lines if isinstance(line, Run)] == ["tests 1", "tests 2"]
    assert json.loads(json.dumps(obtained.to_dict()))["solved"] is True


def test_tier_1_forces_a_new_plan_and_another_strategy(source, trail):
    model = ScriptedChat(Stubborn(trail, "replan", [READ], [FIX, FINISH]))
    obtained = solve(source, trail, model)
    assert obtained.solved and obtained.tier_reached == 1 and obtained.steps == 17
    assert measures(trail)[0] == ("replan", 1)
    first, second = model.calls[15], model.calls[17]
    assert "(trace)" in first["messages"][1]["content"]
    assert "(rewrite)" in second["messages"][1]["content"]
    assert (first["effort"], second["effort"]) == ("low", "medium")
    assert len(first["messages"]) > 20 and len(second["messages"]) == 2
    assert "def test_double" in second["messages"][1]["content"]
    assert "Tried without success: trace." in second["messages"][1]["content"]


def test_tier_2_warns_narrows_the_tools_and_raises_the_model(source, trail):
    cheap = ScriptedChat(Stubborn(trail, "never", [READ], []), name="cheap")
    strong = ScriptedChat([said(LIST), said(READ), said(FIX), said(FINISH)], name="strong")
    obtained = solve(source, trail, cheap, strong)
    assert obtained.solved and obtained.tier_reached == 2 and obtained.steps == 34
    assert measures(trail) == [("replan", 1), ("warn", 2), ("lower", 1)]
    assert len(strong.calls) == 4
    assert "LAST WARNING" in strong.calls[0]["messages"][-1]["content"]
    for asked, tool in ((strong.calls[1], "list"), (strong.calls[2], "read")):
        assert f"{tool} is not allowed" in asked["messages"][-1]["content"]


def test_replies_are_held_to_the_actions_that_are_allowed_where_that_is_set(source, trail):
    model = ScriptedChat(Stubborn(trail, "warn", [READ], [FIX, FINISH]))
    obtained = solve(source, trail, model, held=True)
    assert obtained.solved and obtained.tier_reached == 2
    # with one model effort is raised in place of the model
    assert (model.calls[31]["effort"], model.calls[32]["effort"]) == ("medium", "high")
    plan, *steps = [call["grammar"] for call in model.calls if call["messages"]]
    # plans are free text
    assert plan is None and steps[0] == action_grammar() and steps[-1] == action_grammar(WARNED_TOOLS)
    free = scripted(READ, FIX, FINISH)
    assert solve(source, Trail(), free).solved and {call["grammar"] for call in free.calls} == {None}


def test_after_the_last_warning_edits_may_be_taken_back_and_progress_gives_the_tools_back(source, trail):
    start_over = {"action": "start_over"}
    model = ScriptedChat(Stubborn(trail, "warn", [USELESS], [start_over, FIX, FINISH]))
    obtained = solve(source, trail, model)
    assert obtained.solved and obtained.tier_reached == 2 and "The bug is elsewhere." not in obtained.patch
    warned = decided(trail)[decided(trail).index("warn") :]
    assert "start_over" in warned and "refused" not in warned
    (question,) = (asked for asked in model.calls if asked["messages"][-1]["content"].startswith("All edits are taken"))
    assert "edit, run_tests, start_over and finish are allowed" in question["messages"][-1]["content"]
    trail = Trail()
    model = ScriptedChat(Stubborn(trail, "warn", [READ], [HALF_FIX, RUN, LIST, FIX, FINISH]))
    obtained = solve(source, trail, model)
    assert obtained.solved and obtained.tier_reached == 2
    assert measures(trail) == [("replan", 1), ("warn", 2), ("lower", 1), ("lower", 0)]
    after_list = model.calls[-2]["messages"][-1]["content"]
    assert "README.md" in after_list and "LAST WARNING" not in after_list


@pytest.mark.slow
def test_tier_3_resets_the_workspace_and_a_pristine_copy_takes_the_patch(source, trail, tmp_path, monkeypatch):
    at_reset = []
    reset = Workspace.reset

    def watched(workspace):
        before = contents(workspace.folder)
        reset(workspace)
        at_reset.append((before, contents(workspace.folder)))

    monkeypatch.setattr(Workspace, "reset", watched)
    # breaks another file, and then makes one useless edit for ever
    model = ScriptedChat(Stubborn(trail, "reset", [BREAK, *[USELESS] * 100], [READ, FIX, FINISH]))
    runner = PlainRunner()
    obtained = solve(source, trail, model, runner=runner)
    (before, after) = at_reset[0]
    assert before != after == contents(source)
    assert obtained.solved and obtained.tier_reached == 3
    assert [what for what, _ in measures(trail)] == ["replan", "warn", "reset"]
    strategies = [line.state["name"] for line in trail.decisions if line.what == "strategy"]
    assert len(strategies) == len(set(strategies)) == 3
    (lost,) = (line.state["lost_patch"] for line in trail.decisions if line.what == "reset")
    assert "notes.txt" in lost and "scale.py" in lost
    assert "notes.txt" not in obtained.patch and "scale.py" not in obtained.patch
    assert [len(asked["messages"]) for asked in model.calls[-3:]] == [2, 4, 6]
    for tool in filter(shutil.which, TOOLS):
        pristine = shutil.copytree(source, tmp_path / tool)
        assert applied(obtained.patch, pristine, tool)["numbers_kit/ranges.py"] == FIXED.encode()
        assert PlainRunner().run_command(AgentSettings().full_command, pristine).ok


def test_after_a_reset_the_next_model_goes_on_and_what_is_never_solved_says_why(source, trail):
    cheap = ScriptedChat(Stubborn(trail, "never", [READ], []), name="cheap")
    middle = ScriptedChat(Stubborn(trail, "reset", [RUN], [FIX, FINISH]), name="middle")
    obtained = solve(source, trail, cheap, middle, ScriptedChat([], name="dear"))
    assert obtained.solved and obtained.tier_reached == 3 and obtained.steps == 47
    trail = Trail()
    obtained = solve(source, trail, ScriptedChat(Stubborn(trail, "never", [USELESS, RUN], [])))
    assert not obtained.solved and obtained.failed is None
    assert obtained.steps == 60 and obtained.tier_reached == 3
    assert "60 steps" in obtained.why
    assert "+The bug is elsewhere." in obtained.patch
    assert trail.decisions[-1].what == "unsolved"


@pytest.mark.parametrize("actions", [[LIST], [RUN], [FINISH], [{"action": "start_over"}], [READ, LIST], ["what?"]])
def test_endless_repetition_ends(source, trail, actions):
    model = ScriptedChat(Stubborn(trail, "never", actions, []))
    runner = ReadingRunner()
    obtained = solve(source, trail, model, runner=runner, escalation={"max_steps": 50})
    assert (obtained.solved, obtained.steps, obtained.patch) == (False, 50, "")
    assert runner.runs <= 51
    assert "this very result" in model.calls[10]["messages"][-1]["content"]


def test_only_tests_that_pass_after_the_last_edit_count(source, trail):
    spoil = {**FIX, "old": FIX["new"], "new": FIX["old"]}
    obtained = solve(source, trail, scripted(FIX, RUN, spoil, FINISH), escalation={"max_steps": 4})
    assert not obtained.solved and not obtained.report.ok
    # a last edit is tested by the loop itself
    assert solve(source, Trail(), scripted(READ, FIX), escalation={"max_steps": 2}).solved
    (source / "numbers_kit/ranges.py").write_text(FIXED)
    model = scripted()
    obtained = solve(source, trail, model)
    assert not obtained.solved and "before any edit" in obtained.why and not model.calls


@pytest.mark.parametrize(
    "reply, fault",
    [
        ("I would read the file first.", "not one JSON object"),
        (said({"action": "delete", "path": "a"}), "no action"),
        (said({**READ, "path": "../secret"}), "no path inside"),
        (said({"action": "edit", "path": "tests/test_numbers.py", "old": "== 5", "new": "== 9"}), "read-only"),
        (said({**FIX, "old": "nowhere"}), "does not stand"),
        (said(FINISH), "Not all tests pass"),
    ],
)
def test_a_bad_reply_takes_a_step_and_is_told_what_is_wrong(source, trail, reply, fault):
    model = scripted(reply, FIX, FINISH)
    obtained = solve(source, trail, model)
    assert obtained.solved and obtained.steps == 3
    assert fault in model.calls[2]["messages"][-1]["content"]
    assert "refused" in decided(trail) or reply == said(FINISH)


def test_limits_and_models_that_fail_end_a_run_with_the_patch_so_far(source, trail):
    obtained = solve(source, trail, scripted(USELESS, RUN), limits=Limits(calls=3))
    assert not obtained.solved and obtained.failed is None
    assert obtained.steps == 2 and "limit of 3 calls" in obtained.why
    assert "notes.txt" in obtained.patch
    # what was cut off counts once it is tested
    assert solve(source, Trail(), scripted(FIX), limits=Limits(calls=2)).solved
    obtained = solve(source, Trail(), scripted(FIX), limits=Limits(calls=1))
    assert (obtained.solved, obtained.steps, obtained.patch) == (False, 0, "")
    trail = Trail()
    obtained = solve(source, trail, scripted(USELESS))
    assert not obtained.solved and obtained.steps == 1
    assert "no reply" in obtained.failed and "no answer" in obtained.why
    assert "notes.txt" in obtained.patch
    assert any(isinstance(line, Call) and line.failed for line in trail.lines)


class Unavailable(ReadingRunner):
    """Its sandbox is gone at one of its runs."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def run_command(self, *arguments, **named):
        if self.runs + 1 == self.run:
            raise SandboxUnavailable("bubblewrap is missing")
        return super().run_command(*arguments, **named)


@pytest.mark.parametrize("run", [1, 2])
def test_without_a_sandbox_nothing_is_run_and_the_patch_is_kept(source, trail, run):
    runner = Unavailable(run)
    obtained = solve(source, trail, scripted(FIX, RUN), runner=runner)
    assert not obtained.solved and runner.runs == run - 1
    assert obtained.failed == "bubblewrap is missing" and "bubblewrap is missing" in obtained.why
    assert bool(obtained.patch) == (run == 2)
    assert obtained.usage.calls == (3 if run == 2 else 0)


def test_an_edit_that_could_not_be_tested_is_not_solved_by_the_run_before_it(source, trail):
    obtained = solve(source, trail, scripted(FIX, RUN, USELESS, FINISH), runner=Unavailable(3))
    assert not obtained.solved and obtained.report.ok
    assert obtained.failed == "bubblewrap is missing"


def reports_in_turn(*outputs):
    """A runner that says these, the last one again and again."""
    return Mock(run_command=Mock(side_effect=chain(outputs, repeat(outputs[-1]))))


@pytest.mark.parametrize(
    "after",
    [result(pytest_output({"test_a": True})), result("", 0), result("no tests ran", 0)],
    ids=["one is gone", "the process ended early", "none ran"],
)
def test_a_solution_that_makes_tests_vanish_is_none(source, trail, after):
    runner = reports_in_turn(result(pytest_output({"test_a": True, "test_b": False}), 1), after)
    model = scripted(FIX, FINISH, RUN)
    obtained = solve(source, trail, model, runner=runner, escalation={"max_steps": 3})
    assert not obtained.solved
    assert "MISSING tests/test_numbers.py::test_b" in model.calls[3]["messages"][-1]["content"]


def test_another_tool_counts_by_its_exit_code_and_is_stuck_where_it_fails_alike(source, trail):
    runner = reports_in_turn(*[result(f"1 of 7 failed in {n}.3 s", 1) for n in range(99)])
    model = ScriptedChat(Stubborn(trail, "never", [HALF_FIX, {"action": "start_over"}], []))
    obtained = solve(source, trail, model, runner=runner, test_command=["make", "test"])
    assert obtained.tier_reached == 3 and not obtained.solved
    runner = reports_in_turn(result("1 of 7 failed in 0.3 s", 1), result("7 of 7 in 0.2 s", 0))
    assert solve(source, Trail(), scripted(FIX, FINISH), runner=runner, test_command=["make", "test"]).solved
    # of pytest an exit code alone says nothing: code may have ended the process
    runner = reports_in_turn(result("", None, timed_out=True), result("", 0))
    assert not solve(source, Trail(), scripted(FIX, FINISH), runner=runner, escalation={"max_steps": 2}).solved


@pytest.mark.parametrize("shown", [{**READ, "path": "long.txt"}, "x" * 50_000, LIST])
def test_questions_stay_within_their_limit(source, trail, shown):
    (source / "numbers_kit/long.py").write_text("word " * 20_000)
    (source / "long.txt").write_text("word " * 20_000)
    stubborn = Stubborn(trail, "never", [shown, {**shown, "path": "y" * 900} if shown == LIST else shown, FINISH], [])
    model = ScriptedChat(lambda **asked: "9. Look.\n" * 900 if "Write the plan" in str(asked) else stubborn(**asked))
    settings = AgentSettings(context_chars=8000)
    RepoAgent([model], ReadingRunner(), Desk(trail), settings).solve("x" * 1600, source)
    for asked in model.calls:
        assert sum(len(message["content"]) for message in asked["messages"]) <= 8000
        roles = [message["role"] for message in asked["messages"]]
        assert roles == ["system", *(["user", "assistant"] * len(roles))[: len(roles) - 1]]
        assert roles[-1] == "user"
    steps = [asked["messages"] for asked in model.calls if "Step " in asked["messages"][-1]["content"]]
    assert len(steps) == 60
    assert all(len(messages) > 2 for messages in steps[1:15])
    assert "earlier steps are left out" in steps[12][1]["content"]


def test_a_repeated_run_asks_the_same_questions(source):
    output = []
    for _ in range(2):
        trail = Trail()
        solve(source, trail, ScriptedChat(Stubborn(trail, "reset", [BREAK, USELESS, RUN], [FIX, FINISH])))
        output.append(trail.lines)
    assert output[0] == output[1]
    purposes = [line.purpose for line in output[0] if isinstance(line, Call)]
    assert len(set(purposes)) == len(purposes)


ANY_ACTION = st.sampled_from([LIST, READ, RUN, FIX, HALF_FIX, BREAK, USELESS, FINISH, {"action": "start_over"}, "?"])


@pytest.mark.exhaustive
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ANY_ACTION, min_size=1, max_size=30), tier1=st.integers(1, 4), every=st.integers(1, 3))
def test_whatever_is_done_it_ends_and_what_is_solved_passes(actions, tier1, every, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    source, trail = planted(folder / "source"), Trail()
    escalation = ThreeTierEscalation(tier1, tier1 + 2, tier1 + 4, every, max_steps=30, patience=1)
    obtained = solve(source, trail, ScriptedChat(Stubborn(trail, "never", actions, [])), escalation=escalation)
    assert obtained.steps <= 30
    tiers = [0, *(tier for _, tier in measures(trail))]
    for (what, tier), last in zip(measures(trail), tiers, strict=False):
        assert tier == (last % 3) + 1 if what != "lower" else tier == last % 3 - 1
    if obtained.patch:
        applied(obtained.patch, source, "git")
    assert obtained.solved == ReadingRunner().run_command([], source).ok
    assert obtained.solved == (decided(trail)[-1] == "solved")


@pytest.mark.parametrize(
    "bad",
    [
        *({"unknown": 1}, {"escalation": {"tier9": 1}}, {"workspace": {"files": 1}}, {"test_command": []}),
        *({"test_timeout_s": 0}, {"test_memory_mb": 0}, {"max_tokens": 0}, {"temperature": -1}, {"context_chars": 10}),
    ],
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        AgentSettings.from_dict(bad)


def test_a_task_too_long_and_an_agent_without_a_model_are_refused(source, trail):
    with pytest.raises(ValueError, match="characters"):
        RepoAgent([scripted()], ReadingRunner(), Desk(trail)).solve("x" * 5000, source)
    with pytest.raises(ValueError, match="at least one model"):
        RepoAgent([], ReadingRunner(), Desk(trail))
