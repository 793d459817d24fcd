"""A ladder that is handed to `sigma0.generate` acts where it is switched on, and says so where it is not."""

import warnings

import pytest

import sigma0
from sigma0.ladder import Always, FidelityLadder, Rung

STORY = "Mary went to the kitchen. Where is Mary?"


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_a_ladder_that_is_switched_off_is_no_silent_one(monkeypatch, value):
    monkeypatch.setenv("SIGMA0_LADDER", value)
    pocket = sigma0.load("pocket", dtype="float32")
    ladder = FidelityLadder([Rung.local(*pocket, "pocket")], policy=Always())
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        sigma0.generate(*pocket, STORY, max_new_tokens=4, ladder=ladder)
        sigma0.generate(*pocket, STORY, max_new_tokens=4)
    ours = [str(item.message) for item in output if "ladder" in str(item.message)]
    assert ours == ([] if value == "1" else ["a ladder is given, but SIGMA0_LADDER is not 1: no answer goes up"])
