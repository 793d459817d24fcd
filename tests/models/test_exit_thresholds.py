"""Calibrated thresholds of a model: what is taken where the caller sets none, and what is said where there is none."""

import json
import logging
import shutil

import pytest

import sigma0
from sigma0.checkpoints import CHECKPOINTS, shipped_models
from sigma0.config import RULE_DEFAULTS, ExitConfig
from sigma0.decode.exits import ExitRule
from sigma0.models.exit_thresholds import CalibratedThreshold, ExitThresholds
from tests.reference import tiny_model

# the rules that `sigma0 calibrate` finds thresholds of
CALIBRATED = ("qexit", "margin", "converge", "accel")
PROMISE = {"agreement": 0.99, "confidence": 0.95, "prompts": 2000, "mean_depth": 2.5}
STORED = {
    "margin": {**PROMISE, "theta": 0.97},
    "converge": {**PROMISE, "eps": 0.4},
    "accel": {**PROMISE, "eps": 0.3, "patience": 1, "accel_scale": "states"},
    "accel_steps": {**PROMISE, "mean_depth": 2.0, "eps": 0.58, "patience": 1, "accel_scale": "steps"},
}


@pytest.fixture
def model(request):
    made = tiny_model(seed=1, total_ut_steps=4)
    made.config.name_or_path = f"folder/of-{request.node.name}"
    return made


@pytest.fixture
def calibrated(model):
    model.generation_config.exit_thresholds = STORED
    return model


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({"mode": "converge"}, {"eps": 0.4}),
        ({"mode": "margin", "after_exit": "drop"}, {"theta": 0.97, "after_exit": "drop"}),
        ({"mode": "accel"}, {"eps": 0.58, "patience": 1, "accel_scale": "steps"}),
        ({"mode": "accel", "accel_scale": "states"}, {"eps": 0.3, "patience": 1}),
        ({"mode": "accel", "patience": 1}, {"eps": 0.58, "accel_scale": "steps"}),
        # what the record was not calibrated with is not its own
        ({"mode": "accel", "patience": 3}, {"eps": 0.05, "patience": 3, "accel_scale": "states"}),
        # an explicit value wins, and the rest is the library's, as ever
        ({"mode": "converge", "eps": 0.2}, {"eps": 0.2}),
        ({"mode": "accel", "eps": 0.2}, {"eps": 0.2, "patience": 2, "accel_scale": "states"}),
        ({"mode": "qexit", "q": 0.7}, {"q": 0.7}),
        ({"mode": "qexit"}, {"q": 0.5}),
        ({"mode": "full"}, {}),
    ],
)
def test_what_is_not_set_is_the_models(calibrated, given, used):
    expected = ExitConfig(**{**given, **used})
    assert calibrated.resolve_exit_config(given) == expected
    assert calibrated.resolve_exit_config(ExitConfig(**given)) == expected
    assert calibrated.resolve_exit_config(expected) == expected
    assert calibrated.exit_rule(ExitConfig(**given)).config == expected


def test_a_model_without_one_says_so_once_for_each_rule(model, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            model.exit_rule(ExitConfig(mode="converge"))
            model.resolve_exit_config({"mode": "margin"})
            model.resolve_exit_config({"mode": "qexit", "q": 0.4})
            model.resolve_exit_config(None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    name = model.config.name_or_path
    assert f"sigma0 calibrate {name} --exit converge" in said[0] and "eps 0.05" in said[0]
    assert f"sigma0 calibrate {name} --exit margin" in said[1] and "theta 0.9" in said[1]


def test_a_rule_without_a_model_has_the_librarys():
    for mode, fields in RULE_DEFAULTS.items():
        rule = ExitRule(ExitConfig(mode=mode), 4)
        assert rule.config == ExitConfig(mode=mode, **fields) and rule.threshold == next(iter(fields.values()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"margin": PROMISE}, "margin needs theta, got none of them"),
        ({"margin": {**PROMISE, "theta": 0.9, "q": 0.5}}, "margin needs theta, got q, theta"),
        ({"accel": {**PROMISE, "eps": 0.3}}, "accel needs eps, patience, accel_scale, got eps"),
        ({"fixed": PROMISE}, "fixed: Unexpected"),
        ({"margin": {**PROMISE, "agreement": 1.5, "theta": 0.9}}, "margin.agreement"),
        ({"margin": {**PROMISE, "theta": 7.0}}, "margin.theta: Input should be less than or equal to 1, got 7.0"),
        ({"qexit": {**PROMISE, "q": float("nan")}}, "qexit.q: "),
        ({"converge": {**PROMISE, "eps": float("inf")}}, "converge.eps: Input should be a finite number, got inf"),
        ({"accel": {**STORED["accel"], "patience": 0}}, "accel.patience: Input should be greater than or equal to 1"),
        ({"margin": 3, "qexit": PROMISE}, "margin: Input should be a dictionary"),
    ],
)
def test_bad_records_are_named_in_one_line_with_the_way_out(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=r"`sigma0 calibrate` store it anew$") as caught:
        ExitThresholds.parse(wrong)
    text = str(caught.value)
    assert message in text and "\n" not in text and text.startswith("exit_thresholds: ")
    folder = tmp_path / "pocket"
    shutil.copytree(CHECKPOINTS / "pocket", folder)
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**stored, "exit_thresholds": wrong}))
    with pytest.raises(ValueError, match=r"^generation_config\.json: ") as refused:
        sigma0.load(str(folder), device="cpu")
    assert str(refused.value) == f"generation_config.json: {text}"


def test_records_survive_saving_and_loading(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path)
    again = type(calibrated).from_pretrained(tmp_path)
    assert again.exit_thresholds == ExitThresholds.parse(STORED)
    assert again.exit_thresholds.to_dict() == STORED
    new = CalibratedThreshold(**PROMISE, q=0.3)
    both = again.exit_thresholds.updated({"qexit": new})
    assert both.qexit == new and both.margin == again.exit_thresholds.margin


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_models_have_a_threshold_for_every_rule_which_fires(name, caplog):
    """Every rule stops tokens of an easy answer before the last loop, and writes full depth's text."""
    rules = [mode for mode in CALIBRATED if mode != "qexit" or name != "pocket-raven"]
    stored = json.loads((CHECKPOINTS / name / "generation_config.json").read_text())
    assert set(stored["exit_thresholds"]) == {*rules, "accel_steps"}
    model, tokenizer = sigma0.load(name, device="cpu", dtype="float32")
    prompt = "Mary went to the kitchen. John went to the garden. Max went to the cellar. Where is Mary?"
    full = sigma0.generate(model, tokenizer, prompt, exit_config={"mode": "full"}).text
    with caplog.at_level(logging.WARNING):
        for mode in rules:
            assert model.resolve_exit_config({"mode": mode}) in model.exit_thresholds.configs().values()
            generation = sigma0.generate(model, tokenizer, prompt, exit_config={"mode": mode})
            assert generation.text == full and generation.passes_saved > 0, mode
    assert not caplog.records
    assert model.resolve_exit_config(None) == model.resolve_exit_config({"mode": "margin"})
