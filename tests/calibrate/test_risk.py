"""A confidence and a door out of labelled prompts, by the command, on the shipped model."""

import json

import pytest

import sigma0
from sigma0.calibrate import risk
from sigma0.calibrate.prompts import Prompt, read_prompts
from sigma0.calibrate.risk import calibrate_doors
from sigma0.config import ExitConfig, FateConfig
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.verdict import DoorPolicy
from tests.calibrate.conftest import run

RISK = ("--objective", "risk", "--risk", "0.45")


@pytest.fixture(scope="module")
def labelled(questions):
    return questions(40)


@pytest.mark.slow
def test_the_command_stores_what_the_model_then_uses(labelled, tmp_path):
    folder = tmp_path / "calibrated"
    asked = ("pocket", *RISK, "--prompts", labelled, "--json", "--out", folder)
    result = run(*asked, "--exit", "margin", "--threshold", "0.6", "--max-new-tokens", "20")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert reported["prompts"] == [8, 24, 8] and reported["exit_config"]["theta"] == 0.6
    stored = json.loads((folder / "generation_config.json").read_text())
    assert stored["door_policy"] == reported["chosen"] and stored["fate_config"] == reported["fates"]
    model, tokenizer = sigma0.load(str(folder), dtype="float32")
    assert model.door_policy == DoorPolicy.parse(reported["chosen"])
    assert model.fate_config == FateConfig.parse(reported["fates"])
    assert model.resolve_exit_config(None) == ExitConfig(mode="margin", theta=0.6)
    assert model.exit_rule(ExitConfig()).params(True).growth == reported["fates"]["growth"]
    done = sigma0.generate(model, tokenizer, "The hat is with Mary. Where is the hat?", max_new_tokens=8)
    assert done.policy == model.door_policy
    # and once more from the saved model
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert again["door_policy"] == reported["chosen"] and again["fate_config"] == reported["fates"]


@pytest.mark.slow
def test_the_command_stores_a_certificate(labelled, tmp_path):
    asked = ("pocket", "--prompts", labelled, "--door-rule", "certificate")
    result = run(*asked, *RISK, "--max-new-tokens", "20", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "chosen          converged and contracting, proximity under" in result.output
    policy = sigma0.load(str(tmp_path / "out"))[0].door_policy
    # none of these answers comes near the thresholds that there were
    assert (policy.rule, policy.tau_c) == ("certificate", 0.5)
    result = run(*asked)
    assert result.exit_code == 2 and "--door-rule belongs to --objective risk" in result.output


@pytest.mark.parametrize(
    "options, message",
    [
        (["--risk", "0.01"], "40 prompts cannot promise a risk of at most 0.01"),
        (["--risk", "1.5"], "risk 1.5 is not between 0 and 1"),
        (["--threshold", "0.9"], "--threshold needs --exit"),
        (["--exit", "margin", "--threshold", "1.9"], "theta: must lie in (0, 1], got 1.9"),
        (["--objective", "agreement", "--threshold", "0.9"], "--threshold belongs to --objective risk"),
        (["--labels", "larger"], "--labels larger and --larger MODEL belong together"),
        (["--larger", "pocket-large"], "belong together"),
        (["--objective", "agreement", "--labels", "full-depth"], "--labels belongs to --objective risk"),
    ],
)
def test_bad_options_are_named(labelled, options, message):
    result = run("pocket", "--objective", "risk", "--prompts", labelled, *options)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.slow
def test_a_door_is_chosen_on_the_fit_and_the_test_alone(labelled):
    """The door that the library then keeps is that of the calibration: verdicts of its own answers open it alike."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    answers, fates = risk.answer_all(
        model, tokenizer, read_prompts(labelled), model.resolve_exit_config(None), max_new_tokens=20
    )
    door = risk.choose_door(answers[0] + answers[1], answers[1], DoorPolicy(), 0.45, 0.95)
    assert door.passed
    model.generation_config.fate_config = fates
    model.generation_config.confidence_model = door.model
    model.generation_config.door_policy = door.passed[-1]
    opened = door.judged.opens(door.passed[-1])
    for answer, opens in zip(answers[1], opened.tolist(), strict=True):
        text = tokenizer.decode(answer.prompt_ids)
        again = sigma0.generate(model, tokenizer, text, max_new_tokens=20, special_tokens=True)
        assert again.verdict == answer.verdict(door.passed[-1], door.model)
        assert (again.door == "converge") == opens


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("labels", ["full-depth", "larger"])
def test_labels_of_a_reference(labelled, tmp_path, labels):
    """Right is what the reference says, whatever the prompts say."""
    prompts = [json.loads(line)["prompt"] for line in labelled.read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "nonsense"}) for prompt in prompts))
    more = ["--larger", "pocket-large"] if labels == "larger" else []
    folder = tmp_path / "out"
    asked = ("pocket", *RISK, "--prompts", bare, "--json", "--out", folder)
    result = run(*asked, "--labels", labels, *more, "--max-new-tokens", "12")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert reported["labels"] == (labels if labels == "full-depth" else "pocket-large")
    assert reported["right"] > 0.5
    stored = json.loads((folder / "generation_config.json").read_text())
    fitted = stored.get("confidence_model")
    assert (fitted is None) == (reported["confidence_model"] is None)
    assert fitted is None or ConfidenceModel.parse(fitted).answers == 8


def test_answers_are_needed_and_copies_and_breaks_are_not(labelled, monkeypatch):
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    known = [Prompt(f"Mary has {k} hats. How many?", "4") for k in range(20)]
    with pytest.raises(ValueError, match='prompt 3 has no "answer"'):
        calibrate_doors(model, tokenizer, [*known[:2], Prompt("Where is Mary?"), *known[2:]], risk=0.5)
    with pytest.raises(ValueError, match="prompts 1 and 21 are the same"):
        calibrate_doors(model, tokenizer, [*known, known[0]], risk=0.5)
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    with pytest.raises(ValueError, match="calibrate without it"):
        calibrate_doors(model, tokenizer, read_prompts(labelled), risk=0.45)
