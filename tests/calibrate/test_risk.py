"""Fates and doors out of labelled prompts: the promise, its parts, and the command on the shipped model."""

import json
from math import comb
from random import Random

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sigma0
from sigma0.bench.pocket.prompts import json_line, micro_world
from sigma0.calibrate import risk
from sigma0.calibrate.prompts import Prompt, read_prompts
from sigma0.calibrate.risk import (
    Answered,
    calibrate_doors,
    fit_fates,
    fit_spiral_share,
    opened_and_wrong,
    opens,
    risk_p_value,
)
from sigma0.cli import app
from sigma0.config import ExitConfig, FateConfig
from sigma0.decode.ops import STATISTICS
from sigma0.signals.verdict import DoorPolicy, ReasonVerdict

KNOWN = {"converged": True, "depth": 2.0, "proximity": 0.1, "grounded": None, "stable": "contract"}


def answered(right, saturated=0, tokens=4, proximity=0.1, stable="contract", grounded=None):
    verdicts = [
        ReasonVerdict(
            **{**KNOWN, "converged": place >= saturated, "proximity": proximity, "stable": stable},
            reason="max_depth" if place < saturated else "threshold_met",
        )
        for place in range(tokens)
    ]
    return Answered(right, tuple(verdicts), grounded)


@pytest.mark.parametrize("opened, wrong, allowed", [(1, 0, 0.5), (40, 3, 0.1), (200, 12, 0.05), (7, 7, 0.2)])
def test_the_p_value_is_the_binomial_sum(opened, wrong, allowed):
    expected = sum(comb(opened, k) * allowed**k * (1 - allowed) ** (opened - k) for k in range(wrong + 1))
    assert risk_p_value(opened, wrong, allowed) == pytest.approx(expected, rel=1e-9)


def test_nothing_let_through_proves_nothing():
    assert risk_p_value(0, 0, 0.3) == 1.0


def test_the_promise_holds_in_repeated_draws(monkeypatch):
    monkeypatch.setattr(risk, "SATURATED_SHARES", (0.0, 0.25, 1.0))
    monkeypatch.setattr(risk, "TAUS_C", (0.5,))
    monkeypatch.setattr(risk, "TAUS_G", (0.5,))
    rng, allowed, confidence = np.random.default_rng(0), 0.2, 0.8
    # by the number of saturated tokens 0, 1, 2: how common, and how often wrong. Letting 0 and 1 through has a risk
    # of (0.4 * 0.1 + 0.4 * 0.34) / 0.8 = 0.22, a little above what is allowed, so passing it breaks the promise
    common, wrong = (0.4, 0.4, 0.2), (0.1, 0.34, 0.6)
    broken, lazy, runs = 0, 0, 150

    def draw(count):
        kinds = rng.choice(3, count, p=common)
        return [answered(bool(rng.random() >= wrong[kind]), int(kind)) for kind in kinds]

    for _ in range(runs):
        ranked = risk.rank(draw(120), DoorPolicy(), allowed)
        passed, _ = risk.passing_policies(draw(120), ranked, allowed, confidence)
        broken += any(policy.saturated_share >= 0.25 for policy in passed)
        lazy += not passed
    # 20 % of the runs may break it; 150 runs spread by 3.3 points
    assert 0 < broken / runs <= 0.2 + 2 * 0.033
    assert lazy / runs < 0.3


def test_of_equals_the_one_nearest_to_the_defaults_is_taken():
    answers = [answered(True, grounded=1.0)] * 100
    passed, tested = risk.passing_policies(answers, risk.rank(answers, DoorPolicy(), 0.1), 0.1, 0.95)
    assert passed[0] == DoorPolicy() and tested > 1


def test_what_is_let_through_and_wrong():
    answers = [answered(True), answered(False), answered(False, saturated=2), answered(True, proximity=0.7)]
    opened = opens(answers, DoorPolicy())
    assert opened.tolist() == [True, True, False, False]
    assert opened_and_wrong(opened, answers) == (2, 1)


def paths(gains, turnings=None, loops=6):
    """Statistics of tokens of given gains from loop 3 on, each `[n, T, 8]`."""
    found = torch.zeros(len(gains), loops, len(STATISTICS))
    found[..., STATISTICS.index("residual")] = 1.0
    found[..., STATISTICS.index("change")] = 0.3
    found[:, 2:, STATISTICS.index("gain")] = torch.tensor(gains)
    if turnings is not None:
        found[:, 2:, STATISTICS.index("turning")] = torch.deg2rad(torch.tensor(turnings))
    return found


def test_fates_leave_the_ordinary_course_alone():
    calm = [0.9, 0.9, 0.9, 0.9]
    assert fit_fates([paths([calm, calm])]) == FateConfig()
    # two steps running, each 1.25 times as long as the longest before it
    assert fit_fates([paths([calm, [1.25, 1.25, 0.9, 0.9]])]).growth == 0.3
    # growing, but once only
    assert fit_fates([paths([calm, [4.0, 0.9, 0.9, 0.9]])]).growth == 0.1
    turning = [[80.0] * 4] + [[10.0] * 4] * 9
    assert fit_fates([paths([calm] * 10, turning)]).spiral == 90.0
    assert fit_fates([paths([calm] * 30, [[80.0] * 4] + [[10.0] * 4] * 29)]).spiral == 60.0


def test_the_share_of_spiralling_tokens():
    calm, wild = answered(True), answered(True, stable="spiral")
    assert fit_spiral_share([calm] * 99 + [wild]) == 0.25
    assert fit_spiral_share([calm, wild]) == 1.0


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    file = tmp_path_factory.mktemp("labelled") / "prompts.jsonl"
    file.write_text("\n".join(json_line(prompt) for prompt in micro_world(40, "calibration", 5)))
    return file


def test_the_command_stores_what_the_model_then_uses(labelled, tmp_path):
    asked = ["calibrate", "pocket", "--objective", "risk", "--risk", "0.45", "--prompts", str(labelled), "--json"]
    folder = tmp_path / "calibrated"
    result = CliRunner().invoke(
        app, [*asked, "--exit", "margin", "--threshold", "0.6", "--max-new-tokens", "20", "--out", str(folder)]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["prompts"] == [16, 16, 8] and told["exit_config"]["theta"] == 0.6
    stored = json.loads((folder / "generation_config.json").read_text())
    assert stored["door_policy"] == told["chosen"] and stored["fate_config"] == told["fates"]
    model, tokenizer = sigma0.load(str(folder), dtype="float32")
    assert model.door_policy == DoorPolicy.parse(told["chosen"])
    assert model.fate_config == FateConfig.parse(told["fates"])
    assert model.resolve_exit_config(None) == ExitConfig(mode="margin", theta=0.6)
    assert model.exit_rule(ExitConfig()).boundary(True).growth == told["fates"]["growth"]
    done = sigma0.generate(model, tokenizer, "The hat is with Mary. Where is the hat?", max_new_tokens=8)
    assert done.policy == model.door_policy
    # and once more from the saved model
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert again["door_policy"] == told["chosen"] and again["fate_config"] == told["fates"]


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


def test_what_the_model_asks_for_besides_is_kept(labelled):
    """The promise is made under the policy that is stored, patience and all."""
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    model.generation_config.door_policy = {"patience": 1, "tau_g": 0.1}
    found = calibrate_doors(model, tokenizer, read_prompts(labelled), risk=0.45, max_new_tokens=20)
    assert found.chosen.patience == 1 and found.best[0].patience == 1
    assert found.check.right_of_opened.interval[0] < 1.0
    assert model.door_policy.patience == 1 and model.fate_config != FateConfig(growth=7.0)


def test_calibrating_with_breaks_is_refused(labelled, monkeypatch):
    monkeypatch.setenv("SIGMA0_INNER_BREAK", "1")
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    with pytest.raises(ValueError, match="calibrate without it"):
        calibrate_doors(model, tokenizer, read_prompts(labelled), risk=0.45)


def test_three_loops_have_a_fate():
    turning = paths([[0.9]] * 10, [[170.0]] * 10, loops=3)
    assert fit_fates([turning], patience=1).spiral == 180.0


def test_no_prompt_has_two_parts(labelled, monkeypatch):
    """Policies are ranked, tested and checked on three parts of the prompts that have none in common."""
    parts = {}

    def spied(name):
        real = getattr(risk, name)

        def spy(answers, *rest):
            parts[name] = answers
            return real(answers, *rest)

        monkeypatch.setattr(risk, name, spy)

    for name in ("rank", "passing_policies", "check_policy"):
        spied(name)
    model, tokenizer = sigma0.load("pocket", dtype="float32")
    prompts = read_prompts(labelled)
    calibrated = calibrate_doors(model, tokenizer, prompts, risk=0.45, max_new_tokens=20)
    assert [len(answers) for answers in parts.values()] == [16, 16, 8]
    assert len({id(answer) for answers in parts.values() for answer in answers}) == 40
    order = list(range(40))
    Random(0).shuffle(order)
    right = [
        sigma0.generate(model, tokenizer, prompt.content, max_new_tokens=20).text.strip() == prompt.answer.strip()
        for prompt in (prompts[number] for number in order[32:])
    ]
    assert [answer.right for answer in parts["check_policy"]] == right
    assert (calibrated.check.prompts, calibrated.check.right.value) == (8, sum(right) / 8)


def test_tests_end_at_the_first_policy_that_fails():
    """The order was fixed beforehand: a later policy has no say, however good it looks."""
    answers = [answered(True)] * 100 + [answered(False, saturated=2)] * 100
    good, bad = DoorPolicy(saturated_share=0.0), DoorPolicy(saturated_share=1.0)
    assert risk.passing_policies(answers, [good, bad, good], 0.05, 0.95) == ([good], 2)
    assert risk.passing_policies(answers, [bad, good], 0.05, 0.95) == ([], 1)
    assert risk.passing_policies(answers, [good, good], 0.05, 0.95) == ([good, good], 2)


def test_many_policies_a_hair_over_keep_the_promise():
    """Forty policies with a risk of 0.22 each, of which 0.2 is allowed: testing on after a failure would pass one."""
    rng, allowed, confidence, runs = np.random.default_rng(1), 0.2, 0.8, 200
    policies = [DoorPolicy(tau_c=(place + 0.5) / 40) for place in range(40)]
    broken = 0
    for _ in range(runs):
        # the policy of place k opens for the answers of proximity under its own tau_c
        answers = [
            answered(bool(rng.random() >= 0.22), tokens=1, proximity=place / 40) for place in rng.integers(0, 40, 120)
        ]
        passed, _ = risk.passing_policies(answers, policies[::-1], allowed, confidence)
        broken += bool(passed)
    assert 0 < broken / runs <= 1 - confidence
