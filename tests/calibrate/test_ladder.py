"""The confidence under which tokens go up, against ladders really run."""

import json
import math

import pytest
from typer.testing import CliRunner

from sigma0.bench.pocket.prompts import json_line, micro_world
from sigma0.calibrate.ladder import calibrate_doubt
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
    assert found.tokens == 240 and found.handed_up == pytest.approx(0.3, abs=0.02)
    assert found.alone < found.agreement <= 1


def test_an_agreement_is_kept_by_the_ladder(pair, tokenizer):
    """Where every choice of the two agrees up to a token, the ladder's choice there is as was reckoned."""
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    found = calibrate_doubt(*pair, prompts, agreement=0.7, confidence=0.9, max_new_tokens=5)
    assert found.agreement >= 0.7 and found.handed_up < 1
    assert p_value(1 - found.agreement, len(prompts), 0.3) <= 0.1
    # the very first token has the same past everywhere
    ladder, large = FidelityLadder(pair, policy=Doubt(found.below)), FidelityLadder(pair[1:])
    first = calibrate_doubt(*pair, prompts, rate=0.5, max_new_tokens=1)
    small = FidelityLadder(pair[:1])
    same = [
        small.generate(text, max_new_tokens=1).tokens[0].id == large.generate(text, max_new_tokens=1).tokens[0].id
        for text in TEXTS
    ]
    assert first.alone == pytest.approx(sum(same) / len(same))
    for text in TEXTS[:10]:
        token = ladder.generate(text, max_new_tokens=1).tokens[0]
        alone = small.generate(text, max_new_tokens=1).tokens[0]
        assert (token.rung == "large") == (math.exp(-alone.entropy) < found.below)


def test_what_cannot_be_promised(pair, tokenizer):
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS[:6]]
    with pytest.raises(ValueError, match="6 prompts cannot promise agreement"):
        calibrate_doubt(*pair, prompts)
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
    assert told["policy"] == {"kind": "doubt", "below": told["below"]} and told["asked"] == ["rate", 0.2]
    result = CliRunner().invoke(app, [*asked, "--rate", "0.2"])
    assert "--policy" in result.stdout and "goes up" in result.stdout
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "6 prompts cannot promise" in " ".join(result.output.split())
    result = CliRunner().invoke(app, ["calibrate", "pocket", "--rate", "0.2", "--prompts", str(file)])
    assert result.exit_code == 2 and "--rate belongs to --ladder" in " ".join(result.output.split())
