"""When an agent counts as stuck, and the tiers as a table."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.agent.escalation import MEASURES, Escalator, ProgressTracker, ThreeTierEscalation
from sigma0.reason.agent.reports import TestReport as Report
from sigma0.reason.agent.work_strategies import STRATEGIES, next_strategy, raised


def report(passed="", failed="", errors=""):
    named = [frozenset(names) for names in (passed, failed, errors)]
    ok = bool(passed) and not failed and not errors
    return Report(*named, ok, f"{passed}|{failed}|{errors}", "")


BEFORE = report("a", "bcd")


def checked(*reports, before=BEFORE):
    tracker = ProgressTracker.of_slate(before)
    return tracker, [tracker.check(item) for item in reports]


@pytest.mark.parametrize(
    "after, progress",
    [
        (report("a", "bcd"), False),
        (report("ab", "cd"), True),
        (report("bc", "ad"), True),
        (report("b", "acd"), False),
        (report("", "", "f"), False),
        (report("", "b"), False),
        (report("a", "b"), False),
        (report("ab", "cdef"), True),
        (report("bc", "adef"), False),
        (report("abcd"), True),
    ],
    ids=[
        *("same", "one more", "others but more", "another", "hidden by a broken import", "fewer known, none passes"),
        *("fewer known", "more known", "more pass and more fail", "all"),
    ],
)
def test_progress_is_more_that_pass_and_never_fewer_that_are_seen(after, progress):
    assert ProgressTracker.of_slate(BEFORE).observe(after) is progress


def test_progress_of_tests_that_were_unread_gone_or_unnamed():
    broken = report("", "", "f")
    assert ProgressTracker.of_slate(broken).observe(report("a", "bcd"))
    assert not ProgressTracker.of_slate(broken).observe(report("", "abcd"))
    assert not ProgressTracker.of_slate(report("ab", "c")).observe(report("ac"))
    # a new slate keeps the approaches alone
    fresh = ProgressTracker.of_slate(BEFORE, ["trace"])
    assert fresh == ProgressTracker(**{**ProgressTracker.of_slate(BEFORE).to_dict(), "approaches": ["trace"]})
    assert (fresh.stuck, fresh.history, fresh.pairs, fresh.errors) == (0, [], {}, {})
    failing, passing = (Report(frozenset(), frozenset(), frozenset(), ok, str(ok), "") for ok in (False, True))
    tracker = ProgressTracker.of_slate(failing)
    assert not tracker.observe(failing)
    assert tracker.observe(passing)
    assert not tracker.observe(passing)


def test_checks_that_say_the_same_or_go_to_and_fro_are_stuck_and_new_states_neither_count_nor_reset():
    tracker, progressed = checked(BEFORE, BEFORE, BEFORE)
    assert (tracker.stuck, progressed) == (3, [False] * 3)
    other = report("b", "acd")
    tracker, _ = checked(other, BEFORE, other, BEFORE)
    assert tracker.stuck == 3
    tracker, _ = checked(BEFORE, BEFORE, report("b", "acd"))
    assert tracker.stuck == 2
    tracker.check(BEFORE)
    assert tracker.stuck == 3


def test_progress_resets_the_count_and_what_was_seen():
    tracker, progressed = checked(BEFORE, BEFORE, report("ab", "cd"))
    assert (tracker.stuck, progressed[-1]) == (0, True)
    tracker.check(report("ab", "cd"))
    assert tracker.stuck == 1
    tracker.observe(report("abc", "d"))
    assert tracker.check(report("abc", "d"))
    assert tracker.stuck == 0
    tracker, _ = checked(report("ab", "cd"), BEFORE)
    assert tracker.stuck == 0
    tracker.check(BEFORE)
    assert tracker.stuck == 1


REPORTS = st.lists(st.sets(st.sampled_from("abcde")), max_size=30).map(
    lambda runs: [report("".join(sorted(good)), "".join(sorted(set("abcde") - good))) for good in runs]
)


def test_repeated_actions_errors_and_ping_pong_are_counted():
    tracker = ProgressTracker.of_slate(BEFORE)
    assert tracker.act("read a", "text", refused=False) == 1
    assert tracker.act("edit a", "refused", refused=True) == 1
    assert not tracker.is_ping_pong
    assert tracker.act("read a", "other text", refused=False) == 1
    assert tracker.act("edit a", "refused", refused=True) == 2
    assert tracker.is_ping_pong
    assert tracker.repeats == 1
    assert tracker.repeated_errors == ["refused"]
    tracker.act("edit a", "refused", refused=True)
    assert not tracker.is_ping_pong
    tracker = ProgressTracker.of_slate(BEFORE)
    assert [tracker.act("x", "y", refused=False) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert not tracker.is_ping_pong
    assert tracker.repeats == 4


@given(REPORTS, st.integers(0, 30))
def test_a_tracker_that_was_stored_goes_on_as_if_it_had_not_been(runs, place):
    straight = stored = ProgressTracker.of_slate(report("", "abcde"))
    straight = ProgressTracker.from_dict(straight.to_dict())
    for number, item in enumerate(runs):
        if number == place:
            stored = ProgressTracker.from_dict(json.loads(json.dumps(stored.to_dict())))
        said = [tracker.act(str(number % 2), item.signature, refused=True) for tracker in (straight, stored)]
        assert said[0] == said[1]
        assert straight.check(item) == stored.check(item)
    assert straight == stored


STUCK, FREE, UP = "stuck", "free", "progress"
TABLE = [
    ("nothing before tier 1's step", [(5, STUCK), (10, STUCK)], [None, None], 0),
    ("nothing without stuck checks", [(15, FREE), (30, FREE), (45, FREE)], [None] * 3, 0),
    ("each tier at its step", [(15, STUCK), (30, STUCK), (45, STUCK)], list(MEASURES), 0),
    ("not between their steps", [(15, STUCK), (20, STUCK), (25, STUCK)], ["replan", None, None], 1),
    ("late, one after the other", [(45, STUCK), (50, STUCK), (55, STUCK)], list(MEASURES), 0),
    ("progress lowers by one", [(15, STUCK), (30, STUCK), UP], ["replan", "warn", "lower"], 1),
    ("and again", [(15, STUCK), (30, STUCK), UP, UP, UP], ["replan", "warn", "lower", "lower", None], 0),
    ("lowered, reached again", [(15, STUCK), (30, STUCK), UP, (45, STUCK)], ["replan", "warn", "lower", "warn"], 2),
    ("a slate counts anew", [(15, STUCK), (30, STUCK), (45, STUCK), (55, STUCK)], [*MEASURES, None], 0),
    ("and its tiers act", [(15, STUCK), (30, STUCK), (45, STUCK), (60, STUCK)], [*MEASURES, "replan"], 1),
    ("nothing at the last step", [(15, STUCK), (30, STUCK), (100, STUCK)], ["replan", "warn", None], 2),
]


@pytest.mark.parametrize("events, measures, tier", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_tiers_as_a_table(events, measures, tier):
    escalator = Escalator(ThreeTierEscalation(max_steps=100))
    result = []
    for event in events:
        escalator = Escalator.from_dict(json.loads(json.dumps(escalator.to_dict())))
        if event == UP:
            result.append("lower" if escalator.progress() else None)
        else:
            result.append(escalator.check(event[0], 3 if event[1] == STUCK else 2))
    assert (result, escalator.tier) == (measures, tier)
    assert [step for step in range(1, 11) if escalator.is_check(step)] == [5, 10]


@pytest.mark.parametrize(
    "bad",
    [
        *({"tier1": 0}, {"tier1": 30}, {"tier2": 45}, {"tier3": 30}, {"tier1": 1.5}, {"tier1": True}, {"tier4": 60}),
        *({"check_interval": 0}, {"max_steps": -1}, {"patience": 0}),
    ],
)
def test_a_bad_escalation_is_refused(bad):
    with pytest.raises(ValueError, match=r"tier|check_interval|max_steps|patience"):
        ThreeTierEscalation(**bad)


def test_stored_trackers_and_escalators_with_a_fault_are_refused():
    for bad in ({"tier": 3}, {"slate": -1}, {"config": {"tier5": 1}}, {"unknown": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Escalator.from_dict({"config": {}, **bad})
    for bad in ({"stuk": 1}, {"stuck": -1}, {"history": 3}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ProgressTracker.from_dict(bad)


def test_strategies_are_really_different_and_effort_is_raised_to_the_highest():
    assert len(STRATEGIES) >= 5
    assert len({strategy.name for strategy in STRATEGIES}) == len(STRATEGIES)
    assert len({strategy.instructions for strategy in STRATEGIES}) == len(STRATEGIES)
    assert len({strategy.effort for strategy in STRATEGIES}) > 2
    assert len({strategy.opening for strategy in STRATEGIES}) > 3
    assert all((one.effort, one.opening) != (other.effort, other.opening) for one, other in pairwise(STRATEGIES))
    assert [raised(effort) for effort in ("minimal", "low", "medium", "high")] == ["low", "medium", "high", "high"]


@given(st.integers(0, 20))
def test_the_next_strategy_is_one_not_tried_or_the_one_tried_longest_ago(switches):
    tried = []
    for _ in range(switches):
        tried.append(next_strategy(STRATEGIES, tried).name)
    names = [strategy.name for strategy in STRATEGIES]
    assert tried == [names[number % len(names)] for number in range(switches)]
