"""The fastest threshold under verify, against runs taken one by one."""

import json
from random import Random

import pytest
import torch

import sigma0
from sigma0.calibrate.latency import calibrate_latency, coarse_grid, latency_runs
from tests.calibrate.conftest import random_prompts, run
from tests.marks import slow
from tests.reference import settled_model, tiny_model


@pytest.fixture(scope="module")
def model():
    return settled_model(seed=2, total_ut_steps=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(10, 2, 3)


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", [slow("qexit"), "margin"])
def test_the_choice_has_the_fewest_passes(model, prompts, mode):
    seen = []
    obtained = calibrate_latency(model, prompts, mode, max_new_tokens=7, on_run=seen.append)
    assert seen[-1] == latency_runs(10, mode) == len(seen) and seen == sorted(seen)
    assert len(obtained.tested) == len(coarse_grid(mode)) and (obtained.prompts, obtained.checked_prompts) == (8, 2)
    values = [row.passes_per_token.value for row in obtained.tested]
    chosen = obtained.tested[values.index(min(values))]
    assert getattr(obtained.chosen, "q" if mode == "qexit" else "theta") == chosen.threshold
    assert obtained.chosen.after_exit == "verify" and len(set(values)) > 1
    order = list(range(10))
    Random(0).shuffle(order)
    settings = {"do_sample": False, "exit_config": obtained.chosen, "return_dict_in_generate": True}
    runs = [model.generate(torch.tensor([prompts[number]]), max_new_tokens=7, **settings) for number in order]
    apart = sum(item.loop_passes for item in runs[:2])
    assert obtained.check.passes_per_token.value == pytest.approx(apart / (2 * 6)) != chosen.passes_per_token.value
    passes = sum(item.loop_passes for item in runs[2:])
    assert chosen.passes_per_token.value == pytest.approx(passes / (8 * 6))
    assert chosen.tail_passes_per_token.value == pytest.approx(sum(item.tail_passes for item in runs[2:]) / (8 * 6))
    stood = sum(int(item.accepted[0, 1:].sum()) for item in runs[2:])
    assert chosen.accepted.value == pytest.approx(stood / (8 * 6))
    assert chosen.passes_saved.value == pytest.approx(1 - passes / (8 * 6 * 5))


def test_bad_values_are_named(model, prompts):
    ending = tiny_model(seed=2, total_ut_steps=3)
    ending.generation_config.eos_token_id = list(range(61))
    for asked, message in (
        ({"mode": "fixed"}, "'fixed' has no threshold"),
        ({"prompts": prompts[:4]}, "4 prompts: at least 5"),
        ({"max_new_tokens": 1}, "1 new tokens"),
        ({"model": ending}, "ends with its first token"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_latency(**{"model": model, "prompts": prompts, **asked})


@pytest.mark.slow
def test_the_command_stores_a_verified_setting(questions, tmp_path):
    asked = ["pocket", "--prompts", questions(6), "--objective", "latency", "--exit", "margin"]
    result = run(*asked, "--out", tmp_path / "fast")
    assert result.exit_code == 0, result.output
    model, tokenizer = sigma0.load(str(tmp_path / "fast"), device="cpu", dtype="float32")
    stored = model.resolve_exit_config(None)
    assert stored.after_exit == "verify" and f"theta = {stored.theta:g}" in result.stdout
    prompt = "Mary went to the park. Where is Mary?"
    full = sigma0.generate(model, tokenizer, prompt, exit_config={"mode": "full"})
    assert sigma0.generate(model, tokenizer, prompt).text == full.text
    again = run(*asked, "--json")
    obtained = json.loads(again.stdout)
    assert obtained["chosen"] == stored.to_dict() and "not stored" in again.stderr
    assert run(*asked[:4], "speed").exit_code == 2
