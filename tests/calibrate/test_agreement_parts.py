"""The parts of a calibration: grids, counts of prompts, losses and progress."""

import math
from inspect import signature

import numpy as np
import pytest

from sigma0.calibrate.agreement import (
    GRIDS,
    _losses,
    calibrate,
    calibrate_rules,
    check_distinct,
    check_mode,
    continue_in_full,
    held_out,
    joint_confidence,
    prompts_done,
    prompts_needed,
)
from sigma0.calibrate.kv import calibrate_kv
from sigma0.calibrate.latency import calibrate_latency, coarse_grid, latency_runs
from sigma0.calibrate.ltt import units_needed
from sigma0.calibrate.teacher_forcing import GridReadings
from tests.reference import tiny_model


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


def test_what_is_promised_if_nothing_else_is_said():
    for call in (calibrate, calibrate_rules, calibrate_kv):
        defaults = {name: each.default for name, each in signature(call).parameters.items()}
        assert (defaults["agreement"], defaults["confidence"], defaults["max_new_tokens"]) == (0.99, 0.95, 64)
    assert signature(calibrate_latency).parameters["max_new_tokens"].default == 64


def test_promises_share_the_error_that_is_allowed():
    assert joint_confidence(0.9, 1) == pytest.approx(0.9) and joint_confidence(0.9, 5) == pytest.approx(0.98)


def test_a_fifth_is_set_apart_and_one_at_least():
    assert [held_out(prompts) for prompts in (1, 2, 5, 7, 8, 60)] == [1, 1, 1, 1, 2, 12]
    assert prompts_done(60) == 60 and prompts_done(60, 3) == 84


@pytest.mark.parametrize("agreement, confidence", [(0.5, 0.5), (0.9, 0.9), (0.75, 0.95)])
def test_the_fewest_prompts_leave_enough(agreement, confidence):
    for found, share in zip(prompts_needed(agreement, confidence), (0.0, 0.5), strict=True):
        enough = units_needed(1 - agreement, confidence, share)
        assert found == next(count for count in range(1, 10_000) if count - held_out(count) >= enough)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1.1])
def test_shares_lie_between_nothing_and_all(value):
    with pytest.raises(ValueError, match="agreement"):
        prompts_needed(value, 0.9)
    with pytest.raises(ValueError, match="confidence"):
        prompts_needed(0.9, value)


def test_copies_are_named_by_their_numbers():
    check_distinct([(1,), (2,), (1, 2)])
    with pytest.raises(ValueError, match="prompts 2 and 4 are the same"):
        check_distinct([(1,), (2,), (3,), (2,)])
    assert check_mode("margin") == "margin"
    with pytest.raises(ValueError, match="no threshold"):
        check_mode("full")


def test_a_loss_is_the_share_of_a_texts_tokens_that_differ():
    readings = GridReadings(
        text=np.array([0, 0, 0, 0, 1, 1]),
        same=np.array([[True, False, False, True, False, True], [True] * 6]),
        exits={"g": np.array([[2] * 6, [1, 1, 1, 1, 2, 2], [1] * 6])},
    )
    losses, depths = _losses(readings, "g")
    assert losses.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.5]] and depths == pytest.approx([2, 4 / 3, 1])


def test_twenty_five_prompts_are_continued_at_once():
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
