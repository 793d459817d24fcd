"""Thresholds of doubt on readings made up here."""

import math

import numpy as np
import pytest

from sigma0.calibrate.bootstrap import clustered_share
from sigma0.calibrate.ladder import CONFIDENCES, _checked, _promised, _Reading, calibrate_doubt
from sigma0.calibrate.ltt import passing
from sigma0.ladder import Rung


def reading(confidences, same):
    return _Reading(np.array(confidences), np.array(same, dtype=bool))


def test_confidences_are_even_in_the_logit():
    logits = [7 - place / 20 for place in range(381)]
    assert pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits], rel=1e-3) == list(CONFIDENCES)


def test_the_least_confidence_that_keeps_the_agreement_is_promised():
    rng = np.random.default_rng(0)
    readings = [reading(sure := rng.random(6), rng.random(6) < sure) for _ in range(60)]
    losses = [
        [sum(not same and sure >= below for sure, same in zip(each.confidences, each.same, strict=True)) / 6
         for below in CONFIDENCES]
        for each in readings
    ]  # fmt: skip
    kept = passing(losses, 0.2, 0.9)
    assert 1 < kept < len(CONFIDENCES) and _promised(readings, 0.2, 0.9) == CONFIDENCES[kept - 1]
    assert _promised([reading([1.0], [False])] * 60, 0.2, 0.9) is None
    assert _promised([reading([0.5], [True])] * 60, 0.2, 0.9) == CONFIDENCES[-1]


def test_a_token_goes_up_under_the_threshold_and_not_at_it():
    readings = [reading([0.4, 0.5, 0.6], [False, False, True]), reading([0.3, 0.9], [True, True])]
    check = _checked(readings, 0.5)
    assert (check.prompts, check.tokens) == (2, 5)
    assert check.alone == clustered_share([1, 2], [3, 2]) and check.handed_up == clustered_share([1, 1], [3, 2])
    assert check.agreement == clustered_share([2, 2], [3, 2])


@pytest.fixture(scope="module")
def rungs(looped, tokenizer):
    return Rung.local(looped[0], tokenizer, "small"), Rung.local(looped[1], tokenizer, "large")


@pytest.mark.parametrize(
    "asked", [{"rate": 0.0}, {"rate": 1.0}, {"agreement": 1.0}, {"agreement": 0.0}, {"confidence": 0.0}]
)
def test_shares_lie_between_nothing_and_all(rungs, asked):
    (name,) = asked
    with pytest.raises(ValueError, match=f"{name} .* is not between 0 and 1"):
        calibrate_doubt(*rungs, [(9, 8), (7, 6)], **asked)


def test_a_rate_takes_two_prompts_and_a_promise_more(rungs):
    with pytest.raises(ValueError, match="1 prompts cannot promise a rate: it takes 2"):
        calibrate_doubt(*rungs, [(9, 8)], rate=0.5)
    with pytest.raises(ValueError, match=r"2 prompts cannot promise agreement >= 0\.99 with confidence 0\.95"):
        calibrate_doubt(*rungs, [(9, 8), (7, 6)])
    done = []
    found = calibrate_doubt(*rungs, [(9, 8), (7, 6)], rate=0.5, max_new_tokens=2, on_prompt=done.append)
    assert done == [1, 2] and (found.prompts, found.tokens, found.check.prompts, found.check.tokens) == (1, 2, 1, 2)
    assert (found.asked, found.confidence, found.handed_up) == (("rate", 0.5), None, 0.5)


def test_a_promise_tells_what_was_asked(rungs):
    prompts = [(9, 8 + place) for place in range(5)]
    found = calibrate_doubt(*rungs, prompts, agreement=0.3, confidence=0.5, max_new_tokens=2)
    assert (found.asked, found.confidence, found.prompts) == (("agreement", 0.3), 0.5, 4)
    assert found.agreement >= found.alone and 0 <= found.handed_up <= 1
