"""The fit finds the law that passes were made by, also where some were disturbed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.bench.simulation.inputs import PassClock, PassTime, PassTimes
from sigma0.bench.simulation.measure import TimedPass, fit_passes, knots_for
from sigma0.bench.simulation.replica import PassWork

NOTHING = {
    **dict.fromkeys(("request_ms", "chunk_ms", "telling_ms", "token_ms", "begun_ms", "ended_ms"), 0.0),
    **{"passes": 1, "paces": (1,), "explained": 1},
}


def law(work):
    """Milliseconds: a line that bends at 16 rows, and something for all else that a pass holds."""
    by_rows = 2.0 + 0.05 * min(work.rows, 16) + 0.01 * max(work.rows - 16, 0)
    telling = 1.5 * (work.tokens > 0) + 0.3 * work.tokens
    return by_rows + 0.2 * work.requests + 0.4 * work.chunks + telling + 0.7 * work.begun + 1.1 * work.ended


def passes(seed, noise, disturbed=0.0, count=600):
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        requests = int(rng.integers(1, 17))
        rows, tokens = requests * int(rng.integers(1, 30)), int(rng.integers(0, 4))
        chunks, begun = (int(rng.integers(0, 1 + min(requests, most))) for most in (8, 2))
        work = PassWork(rows, chunks, requests, tokens, begun, int(rng.integers(0, tokens + 1)))
        took = law(work) * max(0.05, 1 + noise * rng.standard_normal()) + 50 * (rng.random() < disturbed)
        result.append(TimedPass(work, took / 1000))
    return result


def test_the_law_is_found():
    result = passes(0, 0.0)
    fitted = fit_passes([result[:250], result[250:]])
    assert fitted.paces == pytest.approx((1.0, 1.0))
    clock = PassClock(fitted)
    for item in result:
        assert 1000 * clock(item.work) == pytest.approx(1000 * item.seconds, rel=1e-6)
    # and goes on after what was seen
    work = PassWork(2000, 0, 3, 2, 0, 0)
    assert 1000 * clock(work) == pytest.approx(law(work), rel=1e-3)


def test_noise_and_disturbed_passes_do_not_bend_it_and_their_time_counts():
    result = passes(1, 0.1, disturbed=0.03, count=3000)
    fitted = fit_passes([result])
    assert 0.6 < fitted.explained < 1 and fitted.passes == 3000
    clock = PassClock(fitted)
    took = sum(item.seconds for item in result)
    assert sum(clock(item.work) for item in result) == pytest.approx(took)
    undisturbed = sum(law(item.work) for item in result) / 1000
    assert took > 1.1 * undisturbed
    for rows, requests, tokens in [(1, 1, 0), (16, 4, 1), (100, 10, 0), (300, 16, 3)]:
        work = PassWork(rows, 0, requests, tokens, 0, 0)
        assert 1000 * clock(work) == pytest.approx(took / undisturbed * law(work), rel=0.08)


def test_a_machine_that_changes_its_speed_is_told_from_the_law():
    rounds = [
        [item._replace(seconds=pace * item.seconds) for item in passes(seed, 0.05)]
        for seed, pace in enumerate((1.0, 1.8, 0.7, 1.0))
    ]
    fitted = fit_passes(rounds)
    middle = fitted.paces[0]
    assert [pace / middle for pace in fitted.paces] == pytest.approx([1.0, 1.8, 0.7, 1.0], rel=0.02)
    assert fitted.explained > 0.9 > fit_passes([[item for result in rounds for item in result]]).explained
    for pace, result in zip(fitted.paces, rounds, strict=True):
        clock = PassClock(fitted, pace)
        assert sum(clock(item.work) for item in result) == pytest.approx(sum(item.seconds for item in result))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 400), st.integers(0, 5), st.integers(1, 16))
def test_nothing_makes_a_pass_shorter(seed, rows, tokens, requests):
    clock = PassClock(fit_passes([passes(seed, 0.3, count=60)]))
    work = PassWork(rows, 0, requests, tokens, 0, 0)
    assert clock(work) > 0
    for name in PassWork._fields:
        assert clock(work._replace(**{name: getattr(work, name) + 7})) >= clock(work)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_knots_rise_and_the_last_two_lie_apart(first, second):
    knots = knots_for(min(first, second), max(first, second))
    assert knots == sorted(set(knots)) and len(knots) >= 2
    assert len(knots) == 2 or knots[-1] > 1.4 * knots[-2]


def test_the_clock_goes_straight_between_points():
    points = tuple(PassTime(rows=rows, milliseconds=time) for rows, time in [(2, 1.0), (4, 2.0), (10, 2.0)])
    times = PassTimes(by_rows=points, **{**NOTHING, "telling_ms": 5, "token_ms": 1, "ended_ms": 2})
    clock = PassClock(times)
    output = [1000 * clock(PassWork(rows, 0, 3, 0, 0, 0)) for rows in (1, 2, 3, 4, 7, 10, 99)]
    assert output == pytest.approx([1, 1, 1.5, 2, 2, 2, 2])
    assert 1000 * clock(PassWork(4, 0, 1, 2, 0, 0)) == pytest.approx(9)
    assert 1000 * clock(PassWork(4, 0, 1, 2, 0, 2)) == pytest.approx(13)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "too few"),
        *(
            ([TimedPass(PassWork(1, 0, 1, 0, 0, 0), took)], "than 0 seconds, got .*seconds")
            for took in (0.0, -1.0, np.nan)
        ),
        ([TimedPass(PassWork(0, 0, 1, 0, 0, 0), 1.0)], "at least 1 row .*rows"),
    ],
)
def test_passes_that_cannot_be_fitted_are_told(broken, message):
    with pytest.raises(ValueError, match=message):
        fit_passes([passes(0, 0.0, count=90), broken])
    with pytest.raises(ValueError, match="too few"):
        fit_passes([passes(0, 0.0, count=10)])


@pytest.mark.parametrize("rows", [(4, 4), (9, 2)])
def test_points_must_rise(rows):
    points = [{"rows": item, "milliseconds": 1.0} for item in rows]
    with pytest.raises(ValueError, match="rising rows"):
        PassTimes(by_rows=points, **NOTHING)
