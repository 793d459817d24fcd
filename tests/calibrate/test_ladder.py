"""The confidence under which tokens go up, against ladders really run."""

import json
import math

import numpy as np
import pytest

from sigma0.calibrate.bootstrap import clustered_share
from sigma0.calibrate.ladder import CONFIDENCES, _checked, _promised, _Reading, calibrate_doubt
from sigma0.calibrate.ltt import p_value, passing
from sigma0.ladder import Doubt, FidelityLadder, Rung
from tests.calibrate.conftest import run

TEXTS = [f"Mary has {k} hats. Where is key {k}?" for k in range(60)]


@pytest.fixture(scope="module")
def pair(looped, tokenizer):
    return [Rung.local(looped[0], tokenizer, "small", {"q": 0.4}), Rung.local(looped[1], tokenizer, "large")]


def test_a_rate_is_that_of_the_tokens(pair, tokenizer):
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:30]]
    obtained = calibrate_doubt(*pair, prompts, rate=0.3, max_new_tokens=8)
    assert (obtained.prompts, obtained.check.prompts) == (24, 6)
    assert obtained.tokens == 192 and obtained.handed_up == pytest.approx(0.3, abs=0.02)
    assert obtained.alone < obtained.agreement <= 1


@pytest.mark.slow
def test_an_agreement_is_kept_by_the_ladder(pair, tokenizer):
    """Where every choice of the two agrees up to a token, the ladder's choice there is as was reckoned."""
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    obtained = calibrate_doubt(*pair, prompts, agreement=0.7, confidence=0.9, max_new_tokens=5)
    assert obtained.agreement >= 0.7 and obtained.handed_up < 1
    assert p_value(1 - obtained.agreement, obtained.prompts, 0.3) <= 0.1
    # the very first token has the same past everywhere
    ladder, large = FidelityLadder(pair, policy=Doubt(obtained.below)), FidelityLadder(pair[1:])
    first = calibrate_doubt(*pair, prompts, rate=0.5, max_new_tokens=1)
    small = FidelityLadder(pair[:1])
    same = [
        small.generate(text, max_new_tokens=1).tokens[0].id == large.generate(text, max_new_tokens=1).tokens[0].id
        for text in TEXTS
    ]
    assert (first.alone * 48 + first.check.alone.value * 12) / 60 == pytest.approx(sum(same) / len(same))
    for text in TEXTS[:10]:
        token = ladder.generate(text, max_new_tokens=1).tokens[0]
        alone = small.generate(text, max_new_tokens=1).tokens[0]
        assert (token.rung == "large") == (math.exp(-alone.entropy) < obtained.below)


def test_the_command(questions):
    file = questions(6)
    asked = ["pocket", "--ladder", "pocket-large", "--prompts", file, "--max-new-tokens", "12"]
    result = run(*asked, "--rate", "0.2", "--json")
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert (reported["prompts"], reported["check"]["prompts"]) == (5, 1)
    assert reported["policy"] == {"kind": "doubt", "below": reported["below"]} and reported["asked"] == ["rate", 0.2]
    result = run(*asked, "--rate", "0.2")
    assert "--policy" in result.stdout and "goes up" in result.stdout and "1 prompts set apart" in result.stdout
    for arguments, output in (
        (asked, "6 prompts cannot promise"),
        (["pocket", "--rate", "0.2", "--prompts", file], "--rate belongs to --ladder"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and output in " ".join(result.output.split())


def reading(confidences, same):
    return _Reading(np.array(confidences), np.array(same, dtype=bool))


def test_confidences_are_even_in_the_logit_and_a_token_goes_up_under_the_threshold_and_not_at_it():
    logits = [7 - place / 20 for place in range(381)]
    assert pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits], rel=1e-3) == list(CONFIDENCES)
    readings = [reading([0.4, 0.5, 0.6], [False, False, True]), reading([0.3, 0.9], [True, True])]
    check = _checked(readings, 0.5)
    assert (check.prompts, check.tokens) == (2, 5)
    assert check.alone == clustered_share([1, 2], [3, 2]) and check.handed_up == clustered_share([1, 1], [3, 2])
    assert check.agreement == clustered_share([2, 2], [3, 2])


def test_the_least_confidence_that_keeps_the_agreement_is_promised():
    rng = np.random.default_rng(0)
    readings = [reading(sure := rng.random(6), rng.random(6) < sure) for _ in range(60)]
    losses = [
        [sum(not same and sure >= below for sure, same in zip(item.confidences, item.same, strict=True)) / 6
         for below in CONFIDENCES]
        for item in readings
    ]  # fmt: skip
    kept = passing(losses, 0.2, 0.9)
    assert 1 < kept < len(CONFIDENCES) and _promised(readings, 0.2, 0.9) == CONFIDENCES[kept - 1]
    assert _promised([reading([1.0], [False])] * 60, 0.2, 0.9) is None
    assert _promised([reading([0.5], [True])] * 60, 0.2, 0.9) == CONFIDENCES[-1]


def test_a_rate_takes_two_prompts_and_a_promise_more(pair):
    for asked in ({"rate": 0.0}, {"rate": 1.0}, {"agreement": 1.0}, {"agreement": 0.0}, {"confidence": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(asked))} .* is not between 0 and 1"):
            calibrate_doubt(*pair, [(9, 8), (7, 6)], **asked)
    with pytest.raises(ValueError, match="are the same"):
        calibrate_doubt(*pair, [(9, 8), (7, 6), (9, 8)], rate=0.5)
    with pytest.raises(ValueError, match="1 prompts cannot promise a rate: it takes 2"):
        calibrate_doubt(*pair, [(9, 8)], rate=0.5)
    with pytest.raises(ValueError, match=r"2 prompts cannot promise agreement >= 0\.99 with confidence 0\.95"):
        calibrate_doubt(*pair, [(9, 8), (7, 6)])
    done = []
    obtained = calibrate_doubt(*pair, [(9, 8), (7, 6)], rate=0.5, max_new_tokens=2, on_prompt=done.append)
    assert done == [1, 2] and (obtained.prompts, obtained.tokens) == (1, 2)
    assert (obtained.check.prompts, obtained.check.tokens) == (1, 2)
    assert (obtained.asked, obtained.confidence, obtained.handed_up) == (("rate", 0.5), None, 0.5)


def test_a_promise_tells_what_was_asked(pair):
    prompts = [(9, 8 + place) for place in range(5)]
    obtained = calibrate_doubt(*pair, prompts, agreement=0.3, confidence=0.5, max_new_tokens=2)
    assert (obtained.asked, obtained.confidence, obtained.prompts) == (("agreement", 0.3), 0.5, 4)
    assert obtained.agreement >= obtained.alone and 0 <= obtained.handed_up <= 1
