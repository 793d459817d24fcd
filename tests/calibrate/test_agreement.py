"""Calibration on a small random model, and the command on the shipped one."""

import json
import math
from inspect import signature
from random import Random

import numpy as np
import pytest
import torch

import sigma0
from sigma0.calibrate.agreement import (
    GRIDS,
    _losses,
    calibrate,
    calibrate_rules,
    continue_in_full,
    held_out,
    joint_confidence,
    prompts_done,
    prompts_needed,
)
from sigma0.calibrate.kv import calibrate_kv
from sigma0.calibrate.latency import calibrate_latency, coarse_grid, latency_runs
from sigma0.calibrate.ltt import p_value, units_needed
from sigma0.calibrate.teacher_forcing import GridReadings, read_forced, read_grids
from sigma0.config import ExitConfig
from sigma0.models.load import checkpoint_folder
from tests.calibrate.conftest import random_prompts, run
from tests.marks import exhaustive, fast_if
from tests.models.raven_reference import save_raven, tiny_raven
from tests.reference import tiny_model


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(60, 3, 5)


@pytest.fixture(scope="module")
def model(prompts):
    """A random model that ends some texts early: its EOS is a token it likes."""
    obtained = tiny_model(seed=1, total_ut_steps=4)
    new = [token for text in continue_in_full(obtained, prompts, 6) for token in text.ids[-text.new + 2 :]]
    obtained.generation_config.eos_token_id = max(sorted(set(new)), key=new.count)
    return obtained


def alone(model, prompt, new, config):
    settings = {"do_sample": False, "exit_config": config, "return_dict_in_generate": True}
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, **settings)


@torch.no_grad()
def agreement_of(model, ids, prompt, config):
    """The share of the ids after a prompt that are those of full depth where the rule exits; and the depths of all."""
    output = model(torch.tensor([ids]), exit_config=config, output_loop_states=True)
    new = slice(prompt - 1, -1)
    agreed = (output.logits[0].argmax(-1) == output.loop_logits[-1, 0].argmax(-1))[new]
    return agreed.float().mean().item(), output.exit_depths[0, new].tolist()


def test_continuations_equal_those_of_one_prompt_alone(model, prompts):
    texts = continue_in_full(model, prompts, 6)
    for prompt, text in zip(prompts, texts, strict=True):
        expected = alone(model, prompt, 6, ExitConfig(mode="full")).sequences[0].tolist()
        assert list(text.ids) == expected and text.new == len(expected) - len(prompt)
    assert len({text.new for text in texts}) > 1, "no sequence ended early: the lengths were not tested"


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("mode", [fast_if(mode in ("qexit", "margin"), mode) for mode in GRIDS])
def test_the_choice_follows_from_losses_taken_one_by_one(model, prompts, mode):
    obtained = calibrate(model, prompts, mode, agreement=0.6, confidence=0.9, max_new_tokens=6)
    assert obtained.prompts == 48
    kept = [row for row in obtained.tested if row.passed]
    assert kept == list(obtained.tested[: len(kept)]) and len(obtained.tested) - len(kept) <= 1
    assert kept, "the test wants a choice"
    for row in obtained.tested:
        assert row.passed == (row.p_value <= 0.1)
        assert row.p_value == pytest.approx(p_value(1 - row.agreement, 48, 0.4))
    order = list(range(60))
    Random(0).shuffle(order)
    texts = continue_in_full(model, [prompts[k] for k in order[12:]], 6)
    for row in (obtained.tested[0], obtained.tested[len(kept) // 2], obtained.tested[-1]):
        config = next(entry for entry in GRIDS[mode] if row.threshold == entry.threshold)
        agreed, depths = [], []
        for text in texts:
            share, depths_of_text = agreement_of(model, text.ids, len(text.ids) - text.new, config)
            agreed.append(share)
            depths += depths_of_text
        assert row.agreement == pytest.approx(np.mean(agreed)) and row.mean_depth == pytest.approx(np.mean(depths))
    assert obtained.chosen is not None and obtained.chosen.threshold == kept[-1].threshold
    # The check once more, with the forward's own exits and the stock loop's free runs.
    shares, passes, most, same = [], 0, 0, []
    for prompt in (prompts[k] for k in order[:12]):
        full, early = (alone(model, prompt, 6, config) for config in (ExitConfig(mode="full"), obtained.chosen))
        shares.append(agreement_of(model, full.sequences[0].tolist(), len(prompt), obtained.chosen)[0])
        same.append(early.sequences.tolist() == full.sequences.tolist())
        passes += early.loop_passes
        most += 4 * (early.sequences.shape[1] - len(prompt) - 1)
    assert obtained.check is not None and obtained.check.prompts == 12
    assert obtained.check.agreement.value == pytest.approx(np.mean(shares))
    assert obtained.check.same.value == pytest.approx(np.mean(same))
    assert obtained.check.passes_saved.value == pytest.approx(1 - passes / most)


def test_too_few_prompts_promise_nothing(model, prompts):
    with pytest.raises(ValueError, match=r"60 prompts cannot promise agreement >= 0\.99 .* 374 without one error"):
        calibrate(model, prompts, agreement=0.99, max_new_tokens=4)
    with pytest.raises(ValueError, match="prompts 3 and 61 are the same"):
        calibrate(model, [*prompts, prompts[2]], agreement=0.6, confidence=0.9)


@pytest.mark.grid(fast=0, slow=2)
@pytest.mark.parametrize("mode", GRIDS)
def test_exits_of_a_whole_grid_are_those_of_each_setting(model, prompts, mode):
    texts = continue_in_full(model, prompts[:12], 6)
    rules = [model.exit_rule(config) for config in GRIDS[mode]]
    readings = read_grids(model, {mode: rules}, texts)
    one_by_one = read_forced(model, {str(place): rule for place, rule in enumerate(rules)}, texts)
    new = one_by_one.is_new
    assert readings.text.tolist() == one_by_one.text[new].tolist()
    assert readings.same.tolist() == one_by_one.same[:, new].tolist()
    expected = np.stack([depths[new] for depths in one_by_one.exits.values()])
    assert readings.exits[mode].tolist() == expected.tolist()
    assert len({depths.tobytes() for depths in expected}) > 3, "the grid hardly parts these tokens"


@pytest.mark.slow
def test_all_rules_at_once_share_the_error_that_is_allowed(model, prompts):
    obtained = calibrate_rules(model, prompts, agreement=0.5, confidence=0.9, max_new_tokens=6)
    assert [rule.mode for rule in obtained] == list(GRIDS)
    for rule in obtained:
        assert all(row.passed == (row.p_value <= 0.1 / len(GRIDS)) for row in rule.tested)
        assert rule.confidence == 0.9 and rule.needed == prompts_needed(0.5, 1 - 0.1 / len(GRIDS))
    margin = calibrate(model, prompts, "margin", agreement=0.5, confidence=1 - 0.1 / len(GRIDS), max_new_tokens=6)
    alone = next(rule for rule in obtained if rule.mode == "margin")
    assert (alone.tested, alone.chosen, alone.check) == (margin.tested, margin.chosen, margin.check)


@pytest.mark.slow
def test_the_command_stores_what_the_next_load_uses(questions, tmp_path):
    folder = tmp_path / "calibrated"
    asked = ("--agreement", "0.93", "--exit", "margin", "--prompts", questions(60), "--dtype", "float32")
    result = run("pocket", *asked, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "promise" in result.stdout and "passes_saved" in result.stdout
    model, _ = sigma0.load(str(folder), device="cpu")
    stored = model.resolve_exit_config(None)
    assert stored.mode == "margin" and f"theta = {stored.theta:g}" in result.stdout
    assert model.generation_config.eos_token_id is not None
    # In a folder of one's own the file is rewritten in place, and the weights are left alone.
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    again = run(folder, "--agreement", "0.7", *asked[2:], "--json")
    assert again.exit_code == 0, again.output
    chosen = json.loads(again.stdout)["chosen"]
    model, _ = sigma0.load(str(folder), device="cpu")
    assert model.resolve_exit_config(None).to_dict() == chosen
    assert chosen["theta"] < stored.theta
    assert weights.stat().st_mtime_ns == before
    assert weights.read_bytes() == (checkpoint_folder("pocket") / weights.name).read_bytes()


@pytest.mark.cpu(6)
def test_the_command_names_bad_input_and_says_when_nothing_qualifies(questions, tmp_path):
    folder = tmp_path / "calibrated"
    file = questions(60)
    wrong = ("--prompts", file, "--agreement", "0.9", "--exit", "converge", "--max-new-tokens", "8")
    with pytest.MonkeyPatch.context() as patch:
        # One setting, which stops every token at its second loop.
        patch.setitem(GRIDS, "converge", (ExitConfig(mode="converge", eps=100.0),))
        result = run("pocket", *wrong, "--out", folder)
    assert result.exit_code == 1, result.output
    for output in ("no threshold of converge keeps agreement >= 0.9", "prompts without one error"):
        assert output in result.stdout
    assert list(folder.iterdir()) == []
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").write_text("x")
    for arguments, message in (
        (("pocket", "--agreement", "0.99"), "60 prompts cannot promise"),
        (("pocket", "--prompts", tmp_path / "none.txt"), "none.txt"),
        (("pocket", "--exit", "fixed"), "'fixed' has no threshold"),
        (("pocket", "--out", full), "not a new or empty folder"),
        (("nowhere",), "no such model"),
        (("pocket", "--agreement", "1"), "agreement 1.0"),
    ):
        result = run(arguments[0], "--prompts", file, *arguments[1:])
        assert result.exit_code == 2 and message in result.output, result.output


@pytest.mark.parametrize("mode, name", [("qexit", "q"), ("margin", "theta")])
def test_probabilities_are_even_in_the_logit(mode, name):
    logits = [11 - place / 10 for place in range(133)]
    assert [getattr(config, name) for config in GRIDS[mode]] == pytest.approx(
        [1 / (1 + math.exp(-logit)) for logit in logits], rel=1e-5
    )


@pytest.mark.parametrize("mode", ["converge", "accel", "accel-steps"])
def test_steps_grow_by_the_same_factor(mode):
    every = [0.005 * 800 ** (place / 299) for place in range(300)]
    expected = [eps for eps in every if mode != "accel-steps" or eps <= 1.02]
    assert [config.eps for config in GRIDS[mode]] == pytest.approx(expected, rel=1e-3)
    if mode != "converge":
        scale = "steps" if mode == "accel-steps" else "states"
        assert {(config.mode, config.patience, config.accel_scale) for config in GRIDS[mode]} == {("accel", 1, scale)}


@pytest.mark.parametrize("agreement, confidence", [(0.5, 0.5), (0.9, 0.9), (0.75, 0.95)])
def test_the_fewest_prompts_leave_enough(agreement, confidence):
    for obtained, share in zip(prompts_needed(agreement, confidence), (0.0, 0.5), strict=True):
        enough = units_needed(1 - agreement, confidence, share)
        assert obtained == next(count for count in range(1, 10_000) if count - held_out(count) >= enough)


def test_shares_counts_and_promises_that_cannot_be_are_refused():
    for value in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="agreement"):
            prompts_needed(value, 0.9)
        with pytest.raises(ValueError, match="confidence"):
            prompts_needed(0.9, value)
    assert joint_confidence(0.9, 5) == pytest.approx(0.98)
    assert [held_out(prompts) for prompts in (1, 2, 5, 7, 8, 60)] == [1, 1, 1, 1, 2, 12]
    assert prompts_done(60) == 60 and prompts_done(60, 3) == 84
    for call in (calibrate, calibrate_rules, calibrate_kv):
        defaults = {name: entry.default for name, entry in signature(call).parameters.items()}
        assert (defaults["agreement"], defaults["confidence"], defaults["max_new_tokens"]) == (0.99, 0.95, 64)
    assert signature(calibrate_latency).parameters["max_new_tokens"].default == 64


def test_a_loss_is_the_share_of_a_texts_tokens_that_differ_and_25_are_continued_at_once():
    readings = GridReadings(
        text=np.array([0, 0, 0, 0, 1, 1]),
        same=np.array([[True, False, False, True, False, True], [True] * 6]),
        exits={"g": np.array([[2] * 6, [1, 1, 1, 1, 2, 2], [1] * 6])},
    )
    losses, depths = _losses(readings, "g")
    assert losses.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.5]] and depths == pytest.approx([2, 4 / 3, 1])
    model, done = tiny_model(seed=1, total_ut_steps=2), []
    prompts = [(5, 9, *range(7, 7 + place % 3)) for place in range(26)]
    prompts = [(*prompt, 8 + place) for place, prompt in enumerate(prompts)]
    texts = continue_in_full(model, prompts, 1, done.append)
    assert done == [25, 26] and [text.ids[:-1] for text in texts] == prompts and {text.new for text in texts} == {1}


@pytest.mark.parametrize("mode", GRIDS)
def test_latency_is_tried_on_a_part_of_the_grid(mode):
    stride = 10 if mode in ("qexit", "margin") else 24
    grid = coarse_grid(mode)
    assert grid == tuple(GRIDS[mode][place] for place in range(0, len(GRIDS[mode]), stride))
    assert latency_runs(60, mode) == 48 * len(grid) + 12 and latency_runs(2, mode) == len(grid) + 1


@pytest.mark.parametrize("mode", ["margin", exhaustive("converge"), exhaustive("accel")])
def test_a_threshold_of_a_model_with_a_coda_is_found_and_checked(mode):
    prompts = random_prompts(60, 3, 5, 1, 53)
    model = tiny_raven("pre", 103, n_layers_in_coda=1)
    model.generation_config.eos_token_id = None
    result = calibrate(model, prompts, mode, agreement=0.6, confidence=0.9, max_new_tokens=6)
    assert result.chosen is not None and result.check is not None
    texts = continue_in_full(model, prompts[:4], 6)
    assert all(text.new == 6 for text in texts)
    readings = read_forced(model, {"rule": model.exit_rule(result.chosen)}, texts)
    kept = readings.same_at(readings.exits["rule"])[readings.is_new]
    assert np.mean(kept) > 0.3


@pytest.mark.slow
def test_the_command_tells_of_a_coda_and_of_a_gate_that_is_missing(tmp_path, pocket):
    folder = save_raven(tmp_path / "raven", pocket[1], "post", 105, n_layers_in_coda=1)
    lines = [json.dumps({"prompt": f"Where is {name} {number}?"}) for name in ("Mary", "John") for number in range(60)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines))
    arguments = ["--exit", "margin", "--agreement", "0.5", "--confidence", "0.6", "--max-new-tokens", "3"]
    reported = run(folder, "--prompts", file, "--device", "cpu", *arguments)
    assert reported.exit_code == 0, reported.output
    without = run(folder, "--prompts", file)
    assert without.exit_code == 2 and "reads a gate" in without.stderr
    assert "through a coda that sees earlier tokens at loop 4" in " ".join(reported.stdout.split())
    model, _ = sigma0.load(str(folder), device="cpu")
    assert model.exit_thresholds.margin is not None and model.resolve_exit_config(None).mode == "margin"
    assert model.resolve_exit_config(ExitConfig(mode="margin")).theta == model.exit_thresholds.margin.theta
