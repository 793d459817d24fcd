"""Whole answers that go up by one score or another."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.ladder.signs import SCORES, SHARES, SIGNS, measure_routes, routed, score
from tests.bench.running import reported


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=30), st.floats(0, 1))
def test_the_most_doubted_answers_are_the_larger_models(answers, share):
    doubt, small, large = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
    ranked = sorted(range(len(answers)), key=lambda place: (-doubt[place], place))
    up = set(ranked[: round(share * len(answers))])
    expected = np.mean([large[place] if place in up else small[place] for place in range(len(answers))])
    assert routed(doubt, small, large, share) == pytest.approx(expected)


def test_a_score_that_knows_more_is_seen():
    rng = np.random.default_rng(0)
    trust = rng.random(4000)
    small, large = (rng.random(4000) < trust).astype(float), (rng.random(4000) < 0.9).astype(float)
    noisy = 1 - trust + rng.normal(0, 0.5, 4000)
    report = measure_routes(("a", "b"), dict(zip(SCORES, (1 - trust, noisy, noisy), strict=True)), small, large, 100)
    assert [route.share for route in report.routes] == list(SHARES)
    assert all(route.over_entropy.interval[0] > 0 for route in report.routes[2:])
    assert report.either_right >= max(report.small_right, report.large_right)
    same = measure_routes(("a", "b"), dict.fromkeys(SCORES, noisy), small, large, 20)
    assert all(route.over_entropy.value == 0 for route in same.routes)


def test_the_command_keeps_its_pools(tmp_path):
    asked = ("routes", "pocket", "pocket", "-n", 12, "--pools", tmp_path)
    report = reported(*asked)
    # a model above itself changes nothing
    assert {value for route in report["routes"] for value in route["right"].values()} == {report["small_right"]}
    written = (tmp_path / "pool-pocket.jsonl").read_text()
    assert len(written.splitlines()) == report["questions"] <= 12
    assert reported(*asked) == report
    assert (tmp_path / "pool-pocket.jsonl").read_text() == written


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
