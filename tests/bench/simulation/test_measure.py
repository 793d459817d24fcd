"""Measuring: where passes take what a law says, the law is found, and the simulation takes as long as the engine."""

import numpy as np
import pytest

from sigma0 import ExitConfig
from sigma0.bench.core.conditions import Conditions
from sigma0.bench.simulation import measure
from sigma0.bench.simulation.inputs import PassClock, read_inputs
from sigma0.bench.simulation.measure import STEPS, Stopwatch, TimedPass, measure_inputs, play
from sigma0.bench.simulation.replica import PassWork
from sigma0.serve.engine.messages import EngineLimits
from tests.bench.core.test_ledger import CONDITIONS
from tests.bench.running import bench
from tests.bench.simulation.test_fitting import law


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
