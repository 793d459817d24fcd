"""Whole answers that go up by one score or another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigma0.bench.ladder.routes import SCORES, SHARES, measure_routes, routed
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
