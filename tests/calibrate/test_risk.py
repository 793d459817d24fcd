"""A confidence and a door out of labelled prompts, by the command, on the shipped model."""

import json
from dataclasses import replace
from random import Random

import pytest
from typer.testing import CliRunner

import sigma0
from sigma0.bench.pocket.prompts import json_line, micro_world
from sigma0.calibrate import risk
from sigma0.calibrate.prompts import Prompt, read_prompts
from sigma0.calibrate.risk import answer_all, calibrate_doors
from sigma0.cli import app
from sigma0.config import ExitConfig, FateConfig
from sigma0.signals.answer import judge_answer
from sigma0.signals.confidence import ConfidenceModel
from sigma0.signals.verdict import DoorPolicy


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    file = tmp_path_factory.mktemp("labelled") / "prompts.jsonl"
    file.write_text("\n".join(json_line(prompt) for prompt in micro_world(40, "calibration", 5)))
    return file


@pytest.mark.slow
def test_the_command_stores_what_the_model_then_uses(labelled, tmp_path):
    asked = ["calibrate", "pocket", "--objective", "risk", "--risk", "0.45", "--prompts", str(labelled), "--json"]
    folder = tmp_path / "calibrated"
    result = CliRunner().invoke(
        app, [*asked, "--exit", "margin", "--threshold", "0.6", "--max-new-tokens", "20", "--out", str(folder)]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["prompts"] == [8, 24, 8] and told["exit_config"]["theta"] == 0.6
    stored = json.loads((folder / "generation_config.json").read_text())
    assert stored["door_policy"] == told["chosen"] and stored["fate_config"] == told["fates"]
    model, tokenizer = sigma0.load(str(folder), dtype="float32")
    assert model.door_policy == DoorPolicy.parse(told["chosen"])
    assert model.fate_config == FateConfig.parse(told["fates"])
    assert model.resolve_exit_config(None) == ExitConfig(mode="margin", theta=0.6)
    assert model.exit_rule(ExitConfig()).params(True).growth == told["fates"]["growth"]
    done = sigma0.generate(model, tokenizer, "The hat is with Mary. Where is the hat?", max_new_tokens=8)
    assert done.policy == model.door_policy
    # and once more from the saved model
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert again["door_policy"] == told["chosen"] and again["fate_config"] == told["fates"]


@pytest.mark.slow
def test_the_command_stores_a_certificate(labelled, tmp_path):
    asked = ["calibrate", "pocket", "--prompts", str(labelled), "--door-rule", "certificate"]
    settings = ["--objective", "risk", "--risk", "0.45", "--max-new-tokens", "20", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*asked, *settings])
    assert result.exit_code == 0 and "chosen          converged and contracting, proximity under" in result.output
    policy = sigma0.load(str(tmp_path / "out"))[0].door_policy
    # none of these answers comes near the thresholds that there were
    assert (policy.rule, policy.tau_c) == ("certificate", 0.5)
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "--door-rule belongs to --objective risk" in result.output


@pytest.mark.exhaustive
def test_a_risk_that_cannot_be_kept_is_told(labelled):
    asked = ["calibrate", "pocket", "--objective", "risk", "--prompts", str(labelled), "--max-new-tokens", "3"]
    result = CliRunner().invoke(app, [*asked, "--risk", "0.3"])  # three tokens are no whole answer
    assert result.exit_code == 1 and "no policy keeps a risk of at most 0.3" in result.output
    assert "nothing was stored" in result.output


@pytest.mark.parametrize(
    "options, message",
    [
        (["--risk", "0.01"], "40 prompts cannot promise a risk of at most 0.01"),
        (["--risk", "1.5"], "risk 1.5 is not between 0 and 1"),
        (["--threshold", "0.9"], "--threshold needs --exit"),
        (["--exit", "margin", "--threshold", "1.9"], "theta: must lie in (0, 1], got 1.9"),
        (["--objective", "agreement", "--threshold", "0.9"], "--threshold belongs to --objective risk"),
    ],
)
def test_bad_options_are_named(labelled, options, message):
    asked = ["calibrate", "pocket", "--objective", "risk", "--prompts", str(labelled), *options]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_answers_are_needed_and_copies_are_not():
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    known = [Prompt(f"Mary has {k} hats. How many?", "4") for k in range(20)]
    with pytest.raises(ValueError, match='prompt 3 has no "answer"'):
        calibrate_doors(model, tokenizer, [*known[:2], Prompt("Where is Mary?"), *known[2:]], risk=0.5)
    with pytest.raises(ValueError, match="prompts 1 and 21 are the same"):
        calibrate_doors(model, tokenizer, [*known, known[0]], risk=0.5)


@pytest.mark.exhaustive
def test_what_the_model_asks_for_besides_is_kept(labelled):
    """The promise is made under the policy that is stored, patience and all."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    model.generation_config.door_policy = {"patience": 1, "tau_c": 0.4}
    found = calibrate_doors(model, tokenizer, read_prompts(labelled), risk=0.45, max_new_tokens=20)
    assert found.chosen.patience == 1 and found.best[0].patience == 1
    assert found.check.right_of_opened.interval[0] < 1.0
    assert model.door_policy.patience == 1 and model.fate_config != FateConfig(growth=7.0)


def test_calibrating_with_breaks_is_refused(labelled, monkeypatch):
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    with pytest.raises(ValueError, match="calibrate without it"):
        calibrate_doors(model, tokenizer, read_prompts(labelled), risk=0.45)


@pytest.mark.exhaustive
def test_no_prompt_has_two_parts(labelled, monkeypatch):
    """Thresholds are ranked, tested and checked on three parts of the prompts that have none in common."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    prompts = read_prompts(labelled)
    (fitting, testing, checking), _ = risk.answer_all(
        model, tokenizer, prompts, model.resolve_exit_config(None), max_new_tokens=20
    )
    assert [len(part) for part in (fitting, testing, checking)] == [8, 24, 8]
    assert len({answer.prompt_ids for answer in (*fitting, *testing, *checking)}) == 40
    order = list(range(40))
    Random(0).shuffle(order)
    right = [
        sigma0.generate(model, tokenizer, prompt.content, max_new_tokens=20).text.strip() == prompt.answer.strip()
        for prompt in (prompts[number] for number in order[32:])
    ]
    assert [answer.right for answer in checking] == right
    calibrated = calibrate_doors(model, tokenizer, prompts, risk=0.45, max_new_tokens=20)
    assert (calibrated.check.prompts, calibrated.check.right.value) == (8, sum(right) / 8)
    share = risk.fit_spiral_share([[token.fate for token in answer.tokens] for answer in fitting])
    door = risk.choose_door(fitting, testing, replace(model.door_policy, spiral_share=share), 0.45, 0.95)
    assert door.judged.right.tolist() == [answer.right for answer in testing]
    assert calibrated.best == (door.ranked[0], *door.judged.opened_and_wrong(door.ranked[0]))
    assert (calibrated.passed, calibrated.chosen) == (len(door.passed), door.passed[-1])


def test_what_is_tested_has_no_part_in_the_order():
    """Labels of the test say what passes, not what is tested."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    parts, _ = answer_all(model, tokenizer, list(micro_world(10, "calibration", 3)), ExitConfig(), 20)
    answers = [answer for part in parts for answer in part] * 3
    wrong = [replace(answer, right=False) for answer in answers]
    right = [replace(answer, right=True) for answer in answers]
    doors = [risk.choose_door(answers, testing, DoorPolicy(), 0.45, 0.9) for testing in (right, wrong)]
    assert doors[0].ranked == doors[1].ranked
    assert doors[0].passed and not doors[1].passed


@pytest.mark.slow
def test_a_door_is_chosen_on_the_fit_and_the_test_alone(labelled):
    """The door that the library then keeps is that of the calibration: verdicts of its own answers open it alike."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    answers, fates = risk.answer_all(
        model, tokenizer, read_prompts(labelled), model.resolve_exit_config(None), max_new_tokens=20
    )
    door = risk.choose_door(answers[0] + answers[1], answers[1], DoorPolicy(), 0.45, 0.95)
    assert door.passed and door.fitted is not None
    model.generation_config.fate_config = fates
    model.generation_config.confidence_model = door.model
    model.generation_config.door_policy = door.passed[-1]
    opened = door.judged.opens(door.passed[-1])
    for answer, opens in zip(answers[1], opened.tolist(), strict=True):
        text = tokenizer.decode(answer.prompt_ids)
        again = sigma0.generate(model, tokenizer, text, max_new_tokens=20, special_tokens=True)
        assert again.verdict == answer.verdict(door.passed[-1], door.model)
        assert (again.door == "converge") == opens


def test_without_wrong_answers_the_door_stands_on_entropy(labelled):
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    answers, _ = risk.answer_all(
        model, tokenizer, read_prompts(labelled)[:10], model.resolve_exit_config(None), max_new_tokens=20
    )
    right = [answer for part in answers for answer in part if answer.right]
    door = risk.choose_door(right, right, DoorPolicy(), 0.45, 0.5)
    assert door.model is None and door.passed
    verdicts = [answer.verdict(DoorPolicy(), None) for answer in right]
    assert door.judged.confidence.tolist() == [verdict.confidence for verdict in verdicts]


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("labels", ["full-depth", "larger"])
def test_labels_of_a_reference(labelled, tmp_path, labels):
    """Right is what the reference says, whatever the prompts say."""
    prompts = [json.loads(line)["prompt"] for line in labelled.read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "nonsense"}) for prompt in prompts))
    more = ["--larger", "pocket-large"] if labels == "larger" else []
    asked = ["calibrate", "pocket", "--objective", "risk", "--risk", "0.45", "--prompts", str(bare), "--json"]
    folder = tmp_path / "out"
    result = CliRunner().invoke(
        app, [*asked, "--labels", labels, *more, "--max-new-tokens", "12", "--out", str(folder)]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["labels"] == (labels if labels == "full-depth" else "pocket-large")
    assert told["right"] > 0.5
    stored = json.loads((folder / "generation_config.json").read_text())
    fitted = stored.get("confidence_model")
    assert (fitted is None) == (told["confidence_model"] is None)
    assert fitted is None or ConfidenceModel.parse(fitted).answers == 8


def test_labels_and_their_model_belong_together(labelled):
    asked = ["calibrate", "pocket", "--prompts", str(labelled)]
    for options, message in (
        (["--objective", "risk", "--labels", "larger"], "--labels larger and --larger MODEL belong together"),
        (["--objective", "risk", "--larger", "pocket-large"], "belong together"),
        (["--labels", "full-depth"], "--labels belongs to --objective risk"),
    ):
        result = CliRunner().invoke(app, [*asked, *options])
        assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_an_answer_is_judged_as_a_user_would_have_it():
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    prompts = list(micro_world(8, "calibration", 7))
    parts, _ = answer_all(model, tokenizer, prompts, model.resolve_exit_config(None), 20)
    answers = [answer for part in parts for answer in part]
    fitted = ConfidenceModel(
        ("mean_entropy",), (0.5,), -1.0, (9.0,), 99, answers[0].prompt_ids[:1], 0.5, (0.5,) * 9, 8, None, 0.1, 0.1
    )
    for answer in answers:
        for policy in (DoorPolicy(), DoorPolicy(tau_c=0.0)):
            for known in (None, fitted, None):
                assert answer.verdict(policy, known) == judge_answer(
                    answer.tokens, answer.total_loops, policy, answer.grounded, answer.collapsed, known,
                    answer.prompt_ids,
                )  # fmt: skip


@pytest.mark.exhaustive
def test_another_exit_rule_takes_the_door_of_the_one_before_away(labelled, tmp_path):
    """The shipped model has a door, which keeps its promise under the rule that it was calibrated with."""
    assert sigma0.load("pocket", dtype="float32")[0].confidence_model is not None
    folder = tmp_path / "faster"
    asked = ["calibrate", "pocket", "--exit", "margin", "--agreement", "0.8", "--confidence", "0.8", "--max-new-tokens"]
    result = CliRunner().invoke(app, [*asked, "4", "--prompts", str(labelled), "--out", str(folder)])
    assert result.exit_code == 0, result.output
    model, _ = sigma0.load(str(folder), dtype="float32")
    assert model.confidence_model is None and model.door_policy == DoorPolicy()
