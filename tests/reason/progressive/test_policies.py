import json

import pytest

from sigma0.reason.progressive.effort import ProgressiveReasoningManager
from sigma0.reason.progressive.policies import PRESETS, ProgressiveConfig, Rise, Stage, chosen_config, named_config


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
    assert chosen_config() == PRESETS["HYBRID_DEFAULT"]
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
