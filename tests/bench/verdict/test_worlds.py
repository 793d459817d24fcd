"""Calibrations where the true risk is known: the promise kept, the power, and the oracle beside it."""

import json

import numpy as np
import pytest
from scipy.stats import binom

from sigma0.bench.verdict.worlds import WORLDS, calibrated, least_p_value, oracle, parts, several_starts
from sigma0.calibrate.doors import risk_p_value
from sigma0.signals.verdict import DoorPolicy
from tests.bench.running import bench
from tests.marks import slow

NAMED = {world.name: world for world in WORLDS}


@pytest.mark.grid(fast=0, slow=1)
@pytest.mark.parametrize("name", ["a hair over, less sure", "easy, less sure"])
@pytest.mark.parametrize("sets", [80, slow(600)])
def test_the_promise_is_kept(name, sets):
    """No more sets are violated than a binomial count at the stated limit has in 999 cases of 1,000."""
    world = NAMED[name]
    obtained = calibrated(world, *parts(world.prompts), sets)
    limit = 1 - world.confidence
    assert 0 < obtained.violated.value * sets <= binom.ppf(0.999, sets, limit)


@pytest.mark.parametrize("name, least", [("rises late", 0.85), ("like pocket", 0.97)])
def test_a_door_is_found_where_one_can_be_promised(name, least):
    world, sets = NAMED[name], 40
    obtained = calibrated(world, *parts(world.prompts), sets)
    assert obtained.chose.value >= least
    assert obtained.opened > 0.5 * world.allowed()


@pytest.mark.exhaustive
@pytest.mark.parametrize("procedure", [least_p_value, several_starts])
@pytest.mark.parametrize("sets", [60, slow(600)])
def test_what_stands_beside_keeps_the_promise_too(procedure, sets):
    world = NAMED["a hair over, less sure"]
    obtained = calibrated(world, 300, 300, sets, procedure=procedure)
    assert 0 < obtained.violated.value * sets <= binom.ppf(0.999, sets, 1 - world.confidence)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["rises late", "easy", "small risk, many prompts", "small risk", "easy, less sure"])
def test_power_beside_the_oracle_and_the_order_before(name):
    world, sets = NAMED[name], 200
    fit, test = parts(world.prompts)
    obtained = calibrated(world, fit, test, sets)
    before = calibrated(world, (fit + test) // 2, (fit + test) // 2, sets, procedure=least_p_value)
    assert obtained.chose.value >= 0.8 * oracle(world, test) and obtained.chose.value > before.chose.value


def test_the_oracle_is_the_power_of_one_test():
    """Against draws: the threshold that the oracle would take passes as often as it says."""
    world = NAMED["near the limit"]
    rng, test, passes = np.random.default_rng(0), 150, 0
    for _ in range(1500):
        answers = world.draw(test, rng)
        passes += risk_p_value(*answers.opened_and_wrong(DoorPolicy(min_confidence=0.0)), world.risk) <= 0.2
    # all are let through, or nearly all: the risk is the same everywhere
    assert oracle(world, test) == pytest.approx(passes / 1500, abs=0.04)
    assert oracle(NAMED["a hair over"], test) == 0.0


def test_a_worlds_risk_is_that_of_its_answers():
    world, rng = NAMED["sure and wrong"], np.random.default_rng(0)
    answers = world.draw(200_000, rng)
    for let_through in (0.05, 0.3, 0.6, 0.9):
        opened, wrong = answers.opened_and_wrong(DoorPolicy(min_confidence=1 - let_through))
        assert float(world.true_risk(let_through)) == pytest.approx(wrong / opened, abs=0.01)
    assert float(world.true_risk(world.allowed())) == pytest.approx(world.risk, abs=1e-4)


def test_the_command(tmp_path):
    out = tmp_path / "worlds.json"
    result = bench("worlds", "--sets", 2, "--out", out)
    reported = json.loads(out.read_text())
    assert reported["sets"] == 2 and [row["world"] for row in reported["worlds"]] == list(NAMED)
    assert all(f"| {name} |" in result.stdout for name in NAMED)
