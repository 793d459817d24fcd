"""The confidence under which tokens go up, against ladders really run."""

import json
import math
from random import Random

import pytest
from typer.testing import CliRunner

from sigma0.bench.pocket.prompts import json_line, micro_world
from sigma0.calibrate.ladder import _promised, _read, calibrate_doubt
from sigma0.calibrate.ltt import p_value
from sigma0.cli import app
from sigma0.ladder import Doubt, FidelityLadder, Rung

TEXTS = [f"Mary has {k} hats. Where is key {k}?" for k in range(60)]


@pytest.fixture(scope="module")
def pair(looped, tokenizer):
    return [Rung.local(looped[0], tokenizer, "small", {"q": 0.4}), Rung.local(looped[1], tokenizer, "large")]


def test_a_rate_is_that_of_the_tokens(pair, tokenizer):
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:30]]
    found = calibrate_doubt(*pair, prompts, rate=0.3, max_new_tokens=8)
    assert (found.prompts, found.check.prompts) == (24, 6)
    assert found.tokens == 192 and found.handed_up == pytest.approx(0.3, abs=0.02)
    assert found.alone < found.agreement <= 1


@pytest.mark.slow
def test_an_agreement_is_kept_by_the_ladder(pair, tokenizer):
    """Where every choice of the two agrees up to a token, the ladder's choice there is as was reckoned."""
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    found = calibrate_doubt(*pair, prompts, agreement=0.7, confidence=0.9, max_new_tokens=5)
    assert found.agreement >= 0.7 and found.handed_up < 1
    assert p_value(1 - found.agreement, found.prompts, 0.3) <= 0.1
    # the very first token has the same past everywhere
    ladder, large = FidelityLadder(pair, policy=Doubt(found.below)), FidelityLadder(pair[1:])
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
        assert (token.rung == "large") == (math.exp(-alone.entropy) < found.below)


@pytest.mark.exhaustive
def test_the_check_is_made_on_prompts_that_had_no_part(pair, tokenizer):
    """Every fifth prompt of a shuffled list; the threshold does not change with what the small model says there."""
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:40]]
    order = list(range(40))
    Random(0).shuffle(order)
    apart, fitting = [prompts[place] for place in order[:8]], [prompts[place] for place in order[8:]]
    found = calibrate_doubt(*pair, prompts, agreement=0.6, confidence=0.8, max_new_tokens=3)
    readings = [_read(*pair, prompt, 3) for prompt in apart]
    up = [reading.confidences < found.below for reading in readings]
    tokens = sum(len(each) for each in up)
    kept = sum(int((reading.same | high).sum()) for reading, high in zip(readings, up, strict=True))
    assert (found.check.prompts, found.check.tokens) == (8, tokens)
    assert found.check.agreement.value == pytest.approx(kept / tokens)
    assert found.check.handed_up.value == pytest.approx(sum(int(each.sum()) for each in up) / tokens)
    fitted = [_read(*pair, prompt, 3) for prompt in fitting]
    assert found.below == _promised(fitted, 1 - 0.6, 0.8)


def test_what_cannot_be_promised(pair, tokenizer):
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:6]]
    with pytest.raises(ValueError, match="6 prompts cannot promise agreement"):
        calibrate_doubt(*pair, prompts)
    with pytest.raises(ValueError, match="1 prompts cannot promise a rate"):
        calibrate_doubt(*pair, prompts[:1], rate=0.5)
    with pytest.raises(ValueError, match="rate 2 is not between"):
        calibrate_doubt(*pair, prompts, rate=2)
    with pytest.raises(ValueError, match="are the same"):
        calibrate_doubt(*pair, [*prompts, prompts[0]], rate=0.5)


def test_the_command(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json_line(prompt) for prompt in micro_world(6, "calibration", 5)))
    asked = ["calibrate", "pocket", "--ladder", "pocket-large", "--prompts", str(file), "--max-new-tokens", "12"]
    result = CliRunner().invoke(app, [*asked, "--rate", "0.2", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["prompts"], told["check"]["prompts"]) == (5, 1)
    assert told["policy"] == {"kind": "doubt", "below": told["below"]} and told["asked"] == ["rate", 0.2]
    result = CliRunner().invoke(app, [*asked, "--rate", "0.2"])
    assert "--policy" in result.stdout and "goes up" in result.stdout and "1 prompts set apart" in result.stdout
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "6 prompts cannot promise" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["calibrate", "pocket", "--rate", "0.2", "--prompts", str(file)])
    assert result.exit_code == 2 and "--rate belongs to --ladder" in " ".join(result.output.split())
