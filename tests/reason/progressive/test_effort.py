"""The manager beside rules stated anew, over every policy and random histories."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import (
    LEVELS,
    PRESETS,
    ProgressiveConfig,
    Rise,
    Stage,
    chosen_config,
    named_config,
)

HISTORIES = st.lists(st.booleans(), max_size=70)
NAMES = sorted(PRESETS)


def run(config, passes):
    manager = ProgressiveReasoningManager(config)
    return manager, [manager.update_after_verification(passed) for passed in passes]


def until_finished(config, passes):
    """What happens if a loop stops where the manager says so; after `passes` everything fails."""
    manager = ProgressiveReasoningManager(config)
    output = []
    for passed in [*passes, *[False] * 100]:
        if manager.get_status()["finished"]:
            break
        output.append(manager.update_after_verification(passed))
    return manager, output


def test_an_update_tells_these_keys_and_the_default_rises_by_schedule_and_gate():
    _, output = run("FAST_TEST", [True])
    level = {"verification_level": "low", "level_upgraded": False}
    assert output == [{"iteration": 0, "passed": True, "consecutive_passes": 1, "success": False, **level}]
    manager, output = run("HYBRID_DEFAULT", [True] * 18)
    levels = ["low", *(item["verification_level"] for item in output)]
    assert levels == ["low"] * 6 + ["medium"] * 7 + ["high"] * 6
    assert [item["iteration"] for item in output if item["level_upgraded"]] == [5, 12]
    assert [item["success"] for item in output] == [False] * 17 + [True]
    assert manager.get_status()["finished"] and manager.get_status()["limit"] is None


def test_a_shut_gate_holds_the_level_whatever_the_schedule_says():
    assert run("HYBRID_DEFAULT", [True] * 5)[0].get_status()["waits_for"] == ["iteration 5"]
    manager, output = run("HYBRID_DEFAULT", [True, False] * 7)
    assert {item["verification_level"] for item in output} == {"low"}
    assert manager.get_status()["waits_for"] == ["2 more passes in a row"]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("A", "low low low low low medium medium medium medium medium high"),
        ("B", "low low low medium medium medium high high high high high"),
        ("C", "low low low medium medium medium medium medium high high high"),
        ("D", "low low medium medium medium high high high high high high"),
        ("E", "low low low low low low medium medium medium medium medium"),
    ],
)
def test_each_policy_when_everything_passes(name, expected):
    manager = ProgressiveReasoningManager(name)
    levels = []
    for _ in range(11):
        levels.append(manager.get_reasoning_effort("verification"))
        manager.update_after_verification(True)
    assert levels == expected.split()


def test_two_tracks_rise_each_by_its_own_schedule_and_a_level_is_left_out_by_policy_alone():
    manager = ProgressiveReasoningManager("C")
    tracks = []
    for _ in range(27):
        tracks.append(tuple(manager.get_reasoning_effort(task) for task in ("generation", "verification")))
        manager.update_after_verification(False)
    assert tracks[2] == ("low", "low") and tracks[3] == ("low", "medium") and tracks[8] == ("low", "high")
    assert tracks[14] == ("low", "high") and tracks[15] == ("medium", "high") and tracks[25] == ("high", "high")
    stages = [Stage("low", 1, until=2), Stage("medium", 1, until=4), Stage("high", 1)]
    late = [False] * 6 + [True]
    for skip, expected in ((False, "medium"), (True, "high")):
        manager, output = run(ProgressiveConfig("late", tuple(stages), skip=skip), late)
        assert output[-1]["verification_level"] == expected
        assert [item["to_level"] for item in manager.get_status()["transitions"]] == [expected]


def test_a_stage_that_takes_too_long_ends_the_run_and_recent_history_is_bounded():
    manager, output = until_finished("D", [True, False] * 5)
    assert manager.get_status()["limit"] == "stage_iterations" and len(output) == 10
    # two stages of one level: the streak starts again, and no level is said to rise
    manager, output = run("D", [True] * 13)
    assert [item["consecutive_passes"] for item in output] == [1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert [item["iteration"] for item in output if item["level_upgraded"]] == [1, 4] and output[-1]["success"]
    manager, output = run("A", [False] * 200)
    status = manager.get_status()
    assert status["recent"] == output[-20:] and len(status["transitions"]) == 2
    assert status["limit"] == "max_iterations" and named_config("a").max_iterations == 30


@given(st.sampled_from(NAMES), HISTORIES)
def test_levels_move_only_through_gates(name, passes):
    """Never down, never over one, and only where the stage's own gates are open, counted here by hand."""
    config = PRESETS[name]
    manager = ProgressiveReasoningManager(config)
    stage = streak = at_stage = 0
    for index, passed in enumerate(passes):
        output = manager.update_after_verification(passed)
        streak, at_stage = (streak + 1 if passed else 0), at_stage + 1
        here = config.stages[stage]
        last = stage + 1 == len(config.stages)
        open_gates = streak >= here.passes and at_stage >= here.at_least and (last or index + 1 >= here.until)
        if open_gates and not last:
            stage, streak, at_stage = stage + 1, 0, 0
        assert (
            output["verification_level"] == config.stages[stage].level == manager.get_reasoning_effort("verification")
        )
        assert output["consecutive_passes"] == streak
        assert output["level_upgraded"] == (config.stages[stage].level != here.level)
        assert output["success"] == (last and open_gates) == manager.get_status()["success"]


@given(st.sampled_from(NAMES), HISTORIES)
def test_limits_always_end_a_run(name, passes):
    manager, output = until_finished(name, passes)
    status = manager.get_status()
    assert status["finished"] and len(output) <= PRESETS[name].max_iterations
    assert status["success"] != (status["limit"] is not None)
    # and the manager itself refuses nothing
    assert manager.update_after_verification(True)["iteration"] == len(output)


@given(st.sampled_from(NAMES), HISTORIES, HISTORIES, st.one_of(st.none(), st.integers(1, 4)), st.booleans())
def test_the_state_survives_a_round_trip_at_any_point(name, before, after, lower_after, skip):
    config = ProgressiveConfig.from_dict({**PRESETS[name].to_dict(), "lower_after": lower_after, "skip": skip})
    manager, _ = run(config, before)
    again = ProgressiveReasoningManager.from_dict(json.loads(json.dumps(manager.to_dict())))
    assert again.get_status() == manager.get_status()
    for passed in after:
        assert again.update_after_verification(passed) == manager.update_after_verification(passed)
    assert again.to_dict() == manager.to_dict()


@given(HISTORIES)
def test_a_level_falls_only_where_the_policy_lets_it(passes):
    config = ProgressiveConfig.from_dict({**PRESETS["SUCCESS_BASED"].to_dict(), "lower_after": 2})
    manager, level = ProgressiveReasoningManager(config), 0
    failures = 0
    for passed in passes:
        result = LEVELS.index(manager.update_after_verification(passed)["verification_level"])
        failures = 0 if passed else failures + 1
        assert result >= level or (level - result == 1 and failures and failures % 2 == 0)
        level = result


def test_a_bad_state_and_an_unknown_task_are_refused_by_name():
    for task in ("", "verify", "Generation", None):
        with pytest.raises(ValueError, match="no such task type"):
            ProgressiveReasoningManager("A").get_reasoning_effort(task)
    state = ProgressiveReasoningManager("A").to_dict()
    for change, named in (
        ({"state": {**state["state"], "stage": 9}}, "stage 9"),
        ({"state": {**state["state"], "streak": -1}}, "streak"),
        ({"state": {**state["state"], "level": "low"}}, "level"),
        ({"config": {**state["config"], "speed": 1}}, "speed"),
        ({"more": 1}, "more"),
    ):
        with pytest.raises(ValueError, match=named):
            ProgressiveReasoningManager.from_dict({**state, **change})


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_found_by_name_and_go_through_json(name):
    config = PRESETS[name]
    assert named_config(name) is config and named_config(name.lower().replace("_", "-")) is config
    assert ProgressiveConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "name, judged_at, passes, stay, iterations, errors",
    [
        ("HYBRID_DEFAULT", [5, 12], [2, 2, 5], 3, 30, 10),
        ("CONSERVATIVE", [8, 16], [3, 3, 5], 5, 35, 12),
        ("AGGRESSIVE", [3, 8], [1, 2, 5], 2, 25, 10),
        ("FAST_TEST", [2, 4], [1, 1, 3], 1, 15, 8),
    ],
)
def test_the_hybrid_presets_are_as_documented(name, judged_at, passes, stay, iterations, errors):
    config = PRESETS[name]
    assert [stage.level for stage in config.stages] == ["low", "medium", "high"]
    assert [stage.until - 1 for stage in config.stages[:-1]] == judged_at
    assert [stage.passes for stage in config.stages] == passes
    assert {stage.at_least for stage in config.stages} == {stay}
    assert (config.max_iterations, config.max_errors) == (iterations, errors)


def test_a_config_is_taken_from_a_file_and_from_the_environment(tmp_path, monkeypatch):
    current = ProgressiveConfig("own", (Stage("medium", 2),), max_iterations=4)
    file = tmp_path / "own.json"
    file.write_text(json.dumps(current.to_dict()))
    assert named_config(str(file)) == current
    monkeypatch.setenv("SIGMA0_PROGRESSIVE_CONFIG", "fast_test")
    assert chosen_config() == PRESETS["FAST_TEST"] == ProgressiveReasoningManager().config
    monkeypatch.setenv("SIGMA0_PROGRESSIVE_CONFIG", "")
    assert chosen_config() == PRESETS["FLAT_HIGH"] == named_config("F")
    monkeypatch.setenv("SIGMA0_PROGRESSIVE_CONFIG", "fastest")
    with pytest.raises(ValueError, match="'fastest'; there are ITERATION_SCHEDULE"):
        ProgressiveReasoningManager()


@pytest.mark.parametrize(
    "text, named", [("[]", "no JSON object"), ("{", "cannot be read"), ('{"policy": "x"}', "stages"), (None, "No such")]
)
def test_a_bad_file_is_told(tmp_path, text, named):
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=named):
        named_config(str(file))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"stages": (Stage("low", 1), Stage("high", 1))}, "one level at a time"),
        ({"stages": (Stage("high", 1), Stage("low", 1))}, "one level at a time"),
        ({"stages": (Stage("low", 0),)}, "at least one pass"),
        ({"stages": ()}, "stages"),
        ({"generation": (Rise(3, "low"),)}, "begin at iteration 0"),
        ({"generation": (Rise(0, "low"), Rise(0, "high"))}, "begin at iteration 0"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"lower_after": 0}, "lower_after"),
        ({"max_errors": 1.5}, "max_errors"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        ProgressiveConfig(**{"policy": "odd", "stages": (Stage("low", 1),), **change})
