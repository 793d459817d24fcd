"""Signs of a token that a larger model would write otherwise."""

import json

import numpy as np
import pytest

from sigma0.bench.ladder.signs import SIGNS, score
from tests.bench.running import reported


def drawn(seed=0, prompts=120, tokens=8):
    rng = np.random.default_rng(seed)
    n = prompts * tokens
    signs = np.exp(rng.normal(-2, 1, (n, 4)))
    differs = rng.random(n) < 1 / (1 + np.exp(-2 * np.log(signs[:, 0]) - 3))
    return signs, differs, np.repeat(np.arange(prompts), tokens)


@pytest.mark.exhaustive
def test_the_sign_that_differences_follow_is_found():
    obtained = score(*drawn(), resamples=100)
    assert tuple(obtained) == SIGNS
    signs, differs, _ = drawn()
    above = signs[differs, 0][:, None] > signs[~differs, 0][None]
    assert obtained["entropy"].auroc.value == pytest.approx(above.mean())
    assert obtained["entropy"].over_entropy.value == 0.0
    # what has no say scores as chance, and adds nothing to what has
    assert obtained["depth"].auroc.interval[0] < 0.5 < obtained["depth"].auroc.interval[1]
    low, high = obtained["all, fitted"].over_entropy.interval
    assert low < 0.005 and high > -0.02 and obtained["all, fitted"].auroc.value > 0.8


def test_without_differences_nothing_is_scored():
    signs, differs, prompt_of = drawn()
    with pytest.raises(ValueError, match="no sign can be scored"):
        score(signs, np.zeros_like(differs), prompt_of)


@pytest.mark.exhaustive
def test_the_command(tmp_path):
    out = tmp_path / "signs.json"
    report = reported("signs", "-n", 60, "--hard", "--out", out)
    assert report == json.loads(out.read_text()) and report["prompts"] == 60
    assert 0 < report["differences"] < 0.5 and report["signs"]["entropy"]["auroc"]["value"] > 0.8
