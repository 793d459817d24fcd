"""What is printed and stored of calibrations, line by line, made up here."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from sigma0.calibrate.agreement import Calibration, Check, Tested
from sigma0.calibrate.bootstrap import Estimate
from sigma0.calibrate.confidence import FeatureFigure
from sigma0.calibrate.doors import DoorCheck
from sigma0.calibrate.kv import KVCalibration, TestedCodec
from sigma0.calibrate.ladder import DoubtCalibration, DoubtCheck
from sigma0.calibrate.latency import LatencyCalibration, VerifiedRuns
from sigma0.calibrate.report import (
    cheapest_rule,
    chosen_depth,
    copy_checkpoint,
    print_doubt,
    print_result,
    readings_note,
    records_of,
    refusal,
    result_json,
    settings_of,
    write_calibration,
)
from sigma0.calibrate.risk import DoorCalibration
from sigma0.config import ExitConfig, FateConfig, KVConfig
from sigma0.models.exit_thresholds import CalibratedThreshold, ExitThresholds
from sigma0.signals.verdict import DoorPolicy
from tests.signals.test_confidence import MODEL


def estimate(value, low=0.25, high=0.75):
    return Estimate(value, (low, high))


CHECK = Check(12, estimate(0.5), estimate(0.625), estimate(2.5), estimate(0.375), None)
RULE = Calibration(
    "qexit", 0.9, 0.95, 48, (36, 80),
    tuple(Tested(0.9 - place / 100, 0.99, 0.015, 3.0 - place / 10, place < 14) for place in range(15)),
    ExitConfig(q=0.77), CHECK,
)  # fmt: skip
NONE = replace(RULE, mode="accel-steps", tested=(Tested(0.005, 0.8, 0.25, 4.0, False),), chosen=None, check=None)
MARGIN = replace(
    RULE, mode="margin", tested=(Tested(0.8, 0.95, 0.01, 1.125, True),), chosen=ExitConfig(mode="margin", theta=0.8),
    check=replace(CHECK, mean_depth=None, rows_saved=estimate(0.125)),
)  # fmt: skip
RUNS = VerifiedRuns(0.9, estimate(1.5), estimate(0.25), estimate(0.75), estimate(0.5))
LATENCY = LatencyCalibration(
    "margin", 48, (RUNS,), ExitConfig(mode="margin", theta=0.9, after_exit="verify"),
    replace(RUNS, accepted=estimate(0.5)), 12,
)  # fmt: skip
CODED = KVConfig(codec="residual", bits=(2, 4), group=32)
KV = KVCalibration(
    0.9, 0.95, 48, (36, 80), 0.75,
    (TestedCodec(KVConfig(codec="int8"), 8.5, 0.99, 0.01, True), TestedCodec(CODED, 3.25, 0.875, 0.5, False)),
    CODED, 12, estimate(0.5),
)  # fmt: skip
DOOR_CHECK = DoorCheck(10, estimate(0.5), estimate(0.4), estimate(0.75), estimate(0.6), 0.875, 0.125, 0.0625)
DOORS = DoorCalibration(
    risk=0.05, confidence=0.95, labels="answers", exit_config=ExitConfig(mode="margin", theta=0.8),
    fates=FateConfig(0.2, 75.0), prompts=(10, 30, 10), right=0.75, confidence_model=MODEL,
    features=(
        FeatureFigure("mean_depth", 0.5, None, None, False), FeatureFigure("length", None, 0.25, 0.125, False),
        FeatureFigure("mean_entropy", 0.75, 0.125, 0.0625, True),
    ),
    passed=3, tested=4, best=(DoorPolicy(), 20, 2), chosen=DoorPolicy(min_confidence=0.875), check=DOOR_CHECK,
    by_entropy=replace(DOOR_CHECK, opened=estimate(0.3)),
)  # fmt: skip
DOUBT = DoubtCalibration(
    0.5, 0.25, 0.95, 48, 200, 0.75, ("rate", 0.25), None,
    DoubtCheck(12, 50, estimate(0.625), estimate(0.2), estimate(0.9)),
)  # fmt: skip


@pytest.fixture
def printed(monkeypatch, capsys):
    """What is printed of a calibration, line by line, without the frames of tables."""
    monkeypatch.setenv("COLUMNS", "200")

    def of(result, show=print_result, *more):
        show(result, *more)
        lines = (re.sub(r"[^\x20-\x7e]+", " ", line).split() for line in capsys.readouterr().out.splitlines())
        return [" ".join(words) for words in lines if words]

    return of


def test_a_rule_is_shown_around_its_choice(printed):
    output = printed([RULE])
    assert output[0] == "qexit on 48 prompts, patient settings first"
    assert output[1].split() == ["q", "agreement", "p-value", "mean", "depth", "kept"]
    rows = [f"{0.9 - place / 100:g} 99.000% 0.015 {3.0 - place / 10:.2f} yes" for place in range(3, 14)]
    assert output[2:14] == [*rows, "0.76 99.000% 0.015 1.60 no"]
    assert output[14:] == [
        "chosen qexit, q = 0.77", "promise agreement >= 0.9 with confidence 0.95",
        "agreement 50.00% (25.00% to 75.00%) on 12 prompts set apart",
        "same text 62.50% (25.00% to 75.00%) of free runs, beside full depth", "passes_saved 37.50% (25.00% to 75.00%)",
        "rows_saved none to tell: there is one token a prompt",
    ]  # fmt: skip


def test_several_rules_are_shown_with_the_cheapest_and_doubt_where_it_was_found(printed):
    whole = replace(RULE, check=replace(CHECK, rows_saved=estimate(0.0625)))
    assert printed([whole, NONE, MARGIN]) == [
        "every rule on 48 prompts: agreement >= 0.9, all at once with confidence 0.95",
        "rule threshold agreement same text mean depth passes_saved rows_saved",
        "qexit q = 0.77 50.00% 62.50% 2.50 37.50% 6.25%", "accel-steps none keeps it",
        "margin theta = 0.8 50.00% 62.50% - 37.50% 12.50%",
        "default margin: the fewest passes on the prompts that the choice was made on",
    ]  # fmt: skip
    assert cheapest_rule([RULE, NONE, MARGIN]) is MARGIN and chosen_depth(RULE) == pytest.approx(1.7)
    assert cheapest_rule([NONE]) is None
    assert printed(DOUBT, print_doubt, "large") == [
        "alone 75.00% of 200 tokens are large's", "goes up confidence under 0.5: 25.00% of the tokens",
        "agreement 95.00%, handed-up tokens counted in", "check 50 tokens of 12 prompts set apart:",
        "goes up 20.00% (25.00% to 75.00%) of them",
        "agreement 90.00% (25.00% to 75.00%), without a ladder 62.50% (25.00% to 75.00%)",
    ]  # fmt: skip
    for lacks in ({"below": None}, {"check": None}):
        assert printed(replace(DOUBT, **lacks), print_doubt, "large") == ["alone 75.00% of 200 tokens are large's"]


def test_what_keeps_nothing_says_why(printed):
    kv, door = replace(KV, chosen=None, check=None), replace(DOORS, chosen=None, check=None)
    for results, output in (
        ([NONE], "no threshold of accel-steps keeps agreement >= 0.9 with confidence 0.95"),
        ([NONE], "eps = 0.005, has a mean agreement of 80.000% over 48 prompts (p = 0.25)"),
        ([NONE], "The promise takes 36 prompts without one error, 80 at half"),
        (kv, "int8 has a mean agreement of 99.000% over 48 prompts (p = 0.01)"),
        (door, "no policy keeps a risk of at most 0.05 with confidence 0.95: the safest lets 20 of 30 answers"),
        (door, "through, 2 of them wrong"),
    ):
        assert printed(results)[-1] == refusal(results) and output in refusal(results)
    assert printed([NONE, NONE])[-2:] == refusal([NONE, NONE]).splitlines() == [refusal([NONE])] * 2


def test_codecs_and_settings_of_latency_are_shown(printed):
    output = printed(KV)
    group = KVConfig(codec="int8").group
    assert output[2:4] == [f"int8 {group} 8.5 99.000% 0.01 yes", "residual 2-4 32 3.25 87.500% 0.5 no"]
    assert output[4:6] == [
        "in few bits 75.0% of what new tokens are read over, in the mean", f"chosen kv_config = {CODED.to_dict()}",
    ]  # fmt: skip
    assert printed(LATENCY)[2:] == [
        "0.9 1.50 0.25 75.0% 50.0%", "chosen margin, theta = 0.9, after_exit = verify",
        "passes_saved 50.00% (25.00% to 75.00%) on 12 prompts set apart",
        "accepted 50.00% (25.00% to 75.00%) of their tokens",
    ]  # fmt: skip


def test_a_door_is_shown_with_its_confidence(printed):
    assert printed(DOORS) == [
        "exit rule margin, theta = 0.8: 75.0% of the answers are right", "fates growth 0.2, spiral from 75 degrees on",
        "confidence fitted on 100 answers, by cross-fitting", "feature AUROC alone log loss saved read",
        "mean_entropy 0.750 +0.1250 (se 0.0625) yes", "length - +0.2500 (se 0.1250) no", "mean_depth 0.500 - no",
        "prompts 4 pairs of ids; new ones up to 25.0% are in calibration",
        "thresholds 3 kept the risk of 4 tested (10 + 30 prompts)",
        "chosen confidence 0.875 or more, proximity under 0.5, groundedness over 0.5",
        "promise of the answers let through at most 5.0% are wrong, with confidence", "0.95",
        "right 50.00% (25.00% to 75.00%) on 10 prompts set apart", "let through 40.00% (25.00% to 75.00%) of them",
        "right of those 75.00% (25.00% to 75.00%)", "of right ones 60.00% (25.00% to 75.00%) let through",
        "confidence AUROC 0.875, calibration error 6.2%, Brier 0.125",
        "mean entropy 30.00% (25.00% to 75.00%) let through, as a door by itself",
    ]  # fmt: skip


def test_a_door_on_entropy_and_other_labels(printed):
    other = replace(
        DOORS, exit_config=ExitConfig(mode="full"), labels="full-depth", confidence_model=None, by_entropy=None,
        chosen=DoorPolicy(tau_g=None), check=replace(DOOR_CHECK, right_of_opened=None, auroc=None),
    )  # fmt: skip
    output = printed(other)
    assert output[:4] == [
        "exit rule full: 75.0% of the answers are right",
        "labels right is what the model at full depth says, which may be wrong itself",
        "fates growth 0.2, spiral from 75 degrees on",
        "confidence exp(-mean entropy): too few answers are wrong, or right, or nothing tells them apart",
    ]
    assert output[5] == "chosen confidence 0.9 or more, proximity under 0.5, no grounding asked for"
    assert (
        "right of those none to tell" in output
        and output[-1] == "mean entropy none keeps the risk, as a door by itself"
    )
    assert output[-2] == "confidence AUROC none to tell, calibration error 6.2%, Brier 0.125"
    figures = tuple(FeatureFigure(f"f{place}", 0.5, place / 100, 0.01, place == 3) for place in range(15))
    names = [line.split()[0] for line in printed(replace(DOORS, features=figures)) if line.startswith("f")]
    assert names == ["fates", "feature", "f3", *(f"f{place}" for place in range(14, 3, -1))]
    named = printed(replace(DOORS, labels="a-model", confidence_model=replace(MODEL, pairs=None)))
    assert named[1] == "labels right is what a-model says, which may be wrong itself"
    assert "prompts too different to tell strange ones; new ones up to 25.0% are in calibration" in named


def test_json_of_one_rule_and_of_several():
    one = result_json([RULE])
    assert isinstance(one, dict) and one["mode"] == "qexit" and one["tested"][0]["passed"] is True
    assert [rule["mode"] for rule in result_json([RULE, MARGIN])] == ["qexit", "margin"]
    assert result_json(LATENCY)["checked_prompts"] == 12 and result_json(KV)["chosen"]["bits"] == (2, 4)
    doors = result_json(DOORS)
    assert doors == DOORS.to_dict() and doors["confidence_model"]["pairs"] == 4
    assert doors["best"] == {"policy": DoorPolicy().to_dict(), "opened": 20, "wrong": 2}
    assert replace(DOORS, confidence_model=replace(MODEL, pairs=None)).to_dict()["confidence_model"]["pairs"] is None
    bare = replace(DOORS, confidence_model=None, chosen=None).to_dict()
    assert bare["confidence_model"] is None and bare["chosen"] is None


def test_what_is_stored_of_each_calibration():
    no_door = {"door_policy": None, "confidence_model": None}
    assert settings_of(LATENCY) == {"exit_config": LATENCY.chosen.to_dict(), **no_door}
    assert settings_of(KV) == {"kv_config": CODED.to_dict()} and settings_of(replace(KV, chosen=None)) == {}
    assert settings_of([NONE]) == {} and settings_of(replace(DOORS, chosen=None)) == {}
    assert settings_of(DOORS) == {
        "exit_config": DOORS.exit_config.to_dict(), "fate_config": DOORS.fates.to_dict(),
        "door_policy": DOORS.chosen.to_dict(), "confidence_model": MODEL.to_dict(),
    }  # fmt: skip
    assert settings_of(replace(DOORS, confidence_model=None))["confidence_model"] is None
    accel = replace(
        RULE, mode="accel-steps", tested=(Tested(0.9, 0.99, 0.01, 2.123456, True),),
        chosen=ExitConfig(mode="accel", eps=0.5, patience=1, accel_scale="steps"),
    )  # fmt: skip
    promise = {"agreement": 0.9, "confidence": 0.95, "prompts": 48}
    assert records_of([accel, NONE, MARGIN]) == {
        "accel_steps": CalibratedThreshold(**promise, mean_depth=2.1235, eps=0.5, patience=1, accel_scale="steps"),
        "margin": CalibratedThreshold(**promise, mean_depth=1.125, theta=0.8),
    }
    known = ExitThresholds(
        converge=CalibratedThreshold(agreement=0.5, confidence=0.5, prompts=9, mean_depth=2, eps=1.0)
    )
    stored = settings_of([RULE, NONE, MARGIN], known)
    assert stored == {
        "exit_config": MARGIN.chosen.to_dict(), "exit_thresholds": known.updated(records_of([RULE, MARGIN])).to_dict(),
        **no_door,
    }  # fmt: skip
    assert set(stored["exit_thresholds"]) == {"qexit", "margin", "converge"}
    assert set(settings_of([RULE])["exit_thresholds"]) == {"qexit"}


def test_a_copy_has_weights_configs_and_licences_and_no_code_and_takes_settings(tmp_path):
    assert readings_note(SimpleNamespace(stages=(1, 0), num_loops=4)) is None
    assert "earlier tokens at loop 4" in readings_note(SimpleNamespace(stages=(0, 2), num_loops=4))
    source, folder = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    folder.mkdir()
    kept = {"a.safetensors", "b.json", "c.jinja", "d.model", "LICENSE", "LICENSE.txt"}
    for name in (*kept, "e.py", "f.bin"):
        (source / name).write_text(name)
    copy_checkpoint(source, folder)
    assert {file.name: file.read_text() for file in folder.iterdir()} == {name: name for name in kept}
    config = GenerationConfig()
    config._from_model_config = True
    write_calibration(SimpleNamespace(generation_config=config), {"kv_config": CODED.to_dict()}, folder)
    assert GenerationConfig.from_pretrained(folder).kv_config["bits"] == [2, 4]
