"""Recorded statistics, one quotient at a time, and the radius of a map whose eigenvalues are known."""

import math
from types import SimpleNamespace

import pytest
import torch

from sigma0.config import FateConfig
from sigma0.decode.ops import FATES, STATISTICS, ExitParams
from sigma0.signals.trajectory import LoopStats, fates_under, jacobian_radius, loop_stats, spectrum
from tests.kernels.test_references import run_loops


def recorded(loops, **values):
    """Steady loops that contract, but for what is given, `[loops, 8]`."""
    steady = {
        "change": 0.1, "bend": 0.01, "gain": 0.9, "turning": 0.1, "radius": 0.9, "angle": 0.5, "residual": 0.1,
        "hazard": 0.5,
    }  # fmt: skip
    return torch.tensor([[{**steady, **values}[name] for name in STATISTICS]] * loops)


def last_fate(statistics, dtype=torch.float32):
    return FATES[int(fates_under(statistics, FateConfig(growth=0.1, spiral=60.0), dtype)[-1])]


@pytest.mark.parametrize(
    "values, fate",
    [
        ({}, "contract"),
        # a fit turns where its roots are complex, between 0 and pi
        ({"angle": math.radians(59)}, "contract"),
        ({"angle": math.radians(61)}, "spiral"),
        ({"angle": 2.5}, "spiral"),
        ({"angle": 3.14159}, "spiral"),
        ({"angle": math.pi}, "contract"),
        ({"angle": 2.5, "residual": 0.51}, "contract"),
        ({"turning": math.radians(61)}, "spiral"),
        ({"gain": 1.05}, "spiral"),
        ({"radius": 1.05}, "contract"),
        ({"radius": 1.2}, "diverge"),
        ({"gain": 1.2}, "diverge"),
    ],
)
def test_each_quotient_decides_a_fate(values, fate):
    assert last_fate(recorded(6, **values)) == fate


def test_the_first_two_loops_have_no_fate_and_a_fit_counts_from_the_fourth():
    found = fates_under(recorded(5, angle=2.5), FateConfig(growth=0.1, spiral=60.0))
    assert [FATES[fate] for fate in found.tolist()] == [None, None, "contract", "spiral", "spiral"]


def test_changes_under_the_noise_of_the_dtype_are_none():
    still = recorded(6, change=4e-7, turning=2.0)
    assert last_fate(still) == "contract" and last_fate(still, torch.float64) == "spiral"
    assert last_fate(recorded(6, change=6e-7, turning=2.0)) == "spiral"


def test_loops_that_were_not_run_have_no_fate():
    statistics = recorded(6)
    statistics[4:] = torch.nan
    assert fates_under(statistics, FateConfig()).tolist() == [0, 0, 1, 1, 0, 0]
    batch = torch.stack([statistics, recorded(6)])[None]
    assert fates_under(batch, FateConfig()).tolist() == [[[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]]


def test_a_first_move_after_a_standstill_is_no_growth():
    statistics = recorded(5, change=0.0, gain=0.0)
    statistics[-1, STATISTICS.index("change")] = 0.1
    assert last_fate(statistics) == "contract"


def test_states_that_double_diverge_whatever_the_change():
    """Each step is as long as the state that it leaves: the changes are equal, and the steps are not."""
    states = 2.0 ** torch.arange(6.0)[:, None] * torch.tensor([[0.6, 0.8]])
    loops = run_loops(states, ExitParams("none", 1.0, 6))
    statistics = torch.stack([loop.statistics[0] for loop in loops])
    statistics[:, STATISTICS.index("radius")] = 0.0
    assert last_fate(statistics) == "diverge"


def test_steps_are_compared_across_a_standstill_of_a_state_that_grew():
    """The state is ten times its first when it stands still; a step as long as the first is a small change then."""
    statistics = recorded(5, residual=1.0)
    changes = torch.tensor([0.0, 9.0, 0.0, 0.1, 0.1])
    statistics[:, STATISTICS.index("change")] = changes
    statistics[:, STATISTICS.index("gain")] = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0])
    # steps of 9, 0, 0.1 and 0.2, in units of the first state
    assert last_fate(statistics) == "contract"
    statistics[-1, STATISTICS.index("gain")] = 200.0
    assert last_fate(statistics) == "diverge"


@pytest.mark.parametrize("shape, fates", [((5, 8), 4), ((5, 8), 6), ((5, 7), 5), ((1, 5, 8), 1), ((8,), 8)])
def test_statistics_of_one_token_have_a_fate_for_each_loop(shape, fates):
    with pytest.raises(ValueError, match="one token"):
        loop_stats(torch.zeros(shape), torch.zeros(fates, dtype=torch.int64))


def test_loops_that_were_run_are_told_in_order():
    statistics = recorded(4)
    statistics[2:] = torch.nan
    first, second = loop_stats(statistics, torch.tensor([0, 1, 0, 0]))
    assert isinstance(first, LoopStats) and (first.loop, first.fate, second.loop, second.fate) == (
        1,
        None,
        2,
        "contract",
    )
    assert second.gain == pytest.approx(0.9) and second.hazard == 0.5


def test_a_path_that_comes_to_rest_has_no_fit():
    states = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.5, 0.0], [1.5, 0.0]]], dtype=torch.float64)
    fit = spectrum(states)
    assert (float(fit.radius), float(fit.angle), float(fit.residual)) == (0.0, 0.0, 1.0)


class Linear:
    """A model whose loop multiplies, and whose norm does nothing."""

    def __init__(self, matrix):
        self.matrix = torch.tensor(matrix, dtype=torch.float64)

    def loop(self, states, rows):
        return states @ self.matrix.T

    def norm(self, states):
        return states


def cache(batch=1, length=4, depth=2):
    return SimpleNamespace(batch=batch, length=length, depth=depth)


def test_the_radius_of_a_matrix_is_its_largest_eigenvalue():
    three = Linear([[0.5, 3.0, 0.0], [0.0, -0.75, 1.0], [0.0, 0.0, 0.25]])
    assert jacobian_radius(three, torch.ones(3, dtype=torch.float64), cache(), 0, 4) == pytest.approx(0.75)
    turning = Linear([[0.0, -0.8, 0.0, 0.0], [0.8, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.1]])
    assert jacobian_radius(turning, torch.ones(4, dtype=torch.float64), cache(), 1, 0) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "given, plane, position",
    [
        (cache(batch=2), 0, 4),
        (cache(batch=0), 0, 4),
        (cache(length=3), 0, 4),
        (cache(), -1, 4),
        (cache(), 2, 4),
        (cache(depth=None), 0, 4),
    ],
)
def test_a_cache_must_hold_the_past_of_the_position(given, plane, position):
    with pytest.raises(ValueError, match="a cache of one sequence"):
        jacobian_radius(Linear([[1.0] * 3] * 3), torch.ones(3, dtype=torch.float64), given, plane, position)


@pytest.mark.parametrize("shape", [(2,), (3, 3), ()])
def test_a_state_is_one_vector_of_three_and_more(shape):
    with pytest.raises(ValueError, match="one state"):
        jacobian_radius(Linear([[1.0] * 3] * 3), torch.ones(shape), cache(), 0, 4)
