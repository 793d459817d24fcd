"""Whatever fails once, every request is answered or failed once, nothing is held, and the server serves on.

The fast runs fail at most `FAST` calls of each point, spread over the phases that the mixed run has; the slow ones as
many as `SLOW` says, which is every call of template, endpoint and grammar, and several of each phase of the others.
`python -m tests.serve.sweep` fails every call of every point.
"""

import logging
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")

from tests.serve.faults import POINTS, Fault, spread
from tests.serve.mixed_run import Bench, problems
from tests.serve.sweep import sweep

FAST = 4
SLOW = dict.fromkeys(POINTS, 60) | {"template": 1000, "endpoint": 1000, "grammar": 1000}


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.fixture(scope="module")
def counted(bench):
    return bench.count()


@pytest.fixture(autouse=True)
def _quiet():
    # every fault is logged with its frames
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.exhaustive
def test_the_mixed_run_is_mixed_and_the_same_each_time(bench, counted):
    report, faults = counted
    assert len(report.outcomes) == 40 and report.held == {} and report.counted == 40 and report.health == 200
    kinds = [outcome.kind for outcome in report.outcomes]
    assert kinds.count("answer") == 36 and kinds.count("left") == 4 and report.preemptions > 0
    assert all(fault.calls > 20 for fault in faults.values())
    # what a request gets does not depend on its place
    assert report.outcomes[:20] == report.outcomes[20:][::-1]
    again, counts = bench.count()
    assert again == report and all(counts[name].phases == fault.phases for name, fault in faults.items())


@pytest.mark.grid(fast=0, slow=2)
@pytest.mark.parametrize("point, most", [*((point, FAST) for point in POINTS), *SLOW.items()])
def test_a_fault_harms_its_own_request_alone(bench, counted, point, most):
    clean, faults = counted
    for at in spread(faults[point].phases, most):
        fault = Fault(point, at)
        wrong = problems(fault, bench.run(fault), clean)
        assert not wrong, (point, at, faults[point].phases[at - 1], wrong)


def test_calls_are_spread_over_phases():
    phases = [("a",)] * 50 + [("b",)] + [("c",)] * 9
    assert spread(phases, 60) == list(range(1, 61))
    assert spread(phases, 3) == [1, 51, 52] and spread(phases, 2) == [1, 51]
    assert spread(phases, 5) == [1, 50, 51, 52, 60] and {1, 50, 51, 52, 60} < set(spread(phases, 9))


@pytest.mark.exhaustive
def test_a_sweep_fails_every_call_and_finds_what_is_wrong(bench, counted, capfd):
    clean, faults = counted
    calls = faults["template"].calls
    assert sweep(bench, "template", clean, calls) == 0
    assert f"template: {calls} calls failed, each in a run of its own; wrong: 0" in capfd.readouterr().out
    # as if the server did not serve on
    assert sweep(bench, "template", replace(clean, after=clean.outcomes[1]), calls) == calls
