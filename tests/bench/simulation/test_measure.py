"""Measuring: where passes take what a law says, the law is found, and the simulation takes as long as the engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0 import ExitConfig
from sigma0.bench.core.conditions import Conditions
from sigma0.bench.simulation import measure
from sigma0.bench.simulation.inputs import PassClock, PassTime, PassTimes, read_inputs
from sigma0.bench.simulation.measure import STEPS, Stopwatch, TimedPass, fit_passes, knots_for, measure_inputs, play
from sigma0.bench.simulation.replica import PassWork
from sigma0.serve.engine.messages import EngineLimits
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.running import bench


@pytest.fixture
def lawful(monkeypatch):
    """Steps take what the law says, and engines are small."""
    step = Stopwatch.step

    def by_law(self, engine):
        events, _ = step(self, engine)
        work, _ = self.passes[-1]
        self.passes[-1] = TimedPass(work, law(work) / 1000)
        return events, law(work) / 1000

    monkeypatch.setattr(Stopwatch, "step", by_law)
    monkeypatch.setattr(measure, "LIMITS", EngineLimits(4, 10**6, 64, 8, 2**21))


def prompts(count):
    rng = np.random.default_rng(0)
    return [(number + 5, *rng.integers(40, 90, int(rng.integers(3, 30))).tolist()) for number in range(count)]


@pytest.mark.exhaustive
def test_the_simulation_takes_as_long_as_the_engine(model, lawful):
    conditions = Conditions.model_validate({**CONDITIONS, "max_new_tokens": 5})
    reported = []
    obtained = measure_inputs(*model, conditions, prompts(12), ExitConfig(q=0.5), reported.append)
    assert reported == list(range(1, STEPS + 1))
    clock = PassClock(obtained.pass_times)
    for work in (PassWork(1, 0, 1, 0, 0, 0), PassWork(9, 2, 3, 1, 1, 0), PassWork(40, 0, 4, 2, 0, 1)):
        assert clock(work) == pytest.approx(law(work) / 1000, rel=1e-6)
    assert obtained.pass_times.explained == pytest.approx(1.0) and len(obtained.pass_times.paces) == 6
    for check in obtained.checks:
        assert check.requests == 48
        assert check.paces == pytest.approx((1.0,) * 12)
        assert check.simulated == pytest.approx(check.measured, rel=1e-6)
    assert [len(kind.answers) for kind in obtained.kinds.values()] == [12, 12]
    assert {depth for answer in obtained.kinds["long"].answers for depth in answer.depths} == {4}
    assert obtained.kinds["short"].passes < obtained.kinds["long"].passes == 20
    # rounds take prompts in turn
    assert sorted(answer.prompt for answer in obtained.kinds["short"].answers) == sorted(map(len, prompts(12)))


def test_arrivals_are_kept(model, lawful):
    from sigma0.serve.engine.engine import Engine
    from sigma0.serve.engine.messages import EngineRequest

    jobs = [EngineRequest(ids, 3, ExitConfig(mode="full")) for ids in prompts(3)]
    engine = Engine(*model, "tiny", measure.LIMITS)
    played = play(engine, [(0.0, jobs[0]), (100.0, jobs[1]), (100.0, jobs[2])], Stopwatch(model[0].device))
    assert [len(end.tokens) for end, _ in played] == [3, 3, 3]
    assert max(seconds for _, seconds in played) < 1, "nobody waits for those that come later"


def test_what_is_not_simulated_is_refused(model):
    conditions = Conditions.model_validate(CONDITIONS)
    with pytest.raises(ValueError, match="after_exit 'drop' is not simulated"):
        measure_inputs(*model, conditions, prompts(12), ExitConfig(q=0.5, after_exit="drop"))
    with pytest.raises(ValueError, match="11 prompts are too few"):
        measure_inputs(*model, conditions, prompts(11), ExitConfig(q=0.5))


@pytest.mark.exhaustive
def test_the_command_writes_inputs_that_can_be_simulated(tmp_path, ledger):
    out = tmp_path / "inputs.json"
    bench("passes", "pocket", "-n", 12, "--max-new-tokens", 4, "--out", out)
    obtained, _ = read_inputs(out)
    assert obtained.conditions.model == "pocket" and obtained.loops == 6 and obtained.clock.startswith("CPU time")
    # nobody is refused, however fast the machine was
    bench("simulate", "--inputs", out, "--replicas", 2, "--requests", 50, "--waiting", 10**6, "--out", ledger)


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
