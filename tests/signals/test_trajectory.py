"""Spectra of known maps, fates, and the loop map's own radius."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.config import FateConfig
from sigma0.decode.ops import FATES, STATISTICS, ExitParams
from sigma0.signals.trajectory import _OnePosition, fates_under, jacobian_radius, loop_stats, spectrum
from tests.kernels import definitions
from tests.kernels.test_references import planar, run_loops
from tests.models.raven_reference import tiny_raven
from tests.reference import tiny_model


@pytest.mark.parametrize("radius, angle", [(0.9, 75.0), (1.3, 20.0), (0.5, 57.0), (0.99, 120.0)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3, 1e-20])
@pytest.mark.parametrize("loops", [4, 5, 9])
def test_a_hidden_rotation_comes_back(radius, angle, scale, loops):
    states = torch.stack(
        [planar(radius, math.radians(angle), loops=loops, scale=scale, seed=seed) for seed in range(3)]
    )
    fit = spectrum(states)
    torch.testing.assert_close(fit.radius, torch.full((3,), radius), rtol=0, atol=1e-3)
    torch.testing.assert_close(fit.angle, torch.full((3,), math.radians(angle)), rtol=0, atol=1e-3)
    assert float(fit.residual.max()) < 1e-2 and fit.radius.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 2**16), st.sampled_from([4, 5]))
def test_spectra_are_the_definitions(width, seed, loops):
    rng = np.random.default_rng(seed)
    states = np.cumsum(rng.standard_normal((loops, width)) * 0.8 ** np.arange(loops)[:, None], 0)
    radius, angle, residual, _ = definitions.spectrum(states)
    fit = spectrum(torch.from_numpy(states)[None])
    assert float(fit.radius) == pytest.approx(radius, rel=1e-6, abs=1e-6)
    assert float(fit.angle) == pytest.approx(angle, rel=1e-5, abs=1e-5)
    assert float(fit.residual) == pytest.approx(residual, rel=1e-5, abs=1e-5)


def test_paths_that_stand_still_go_straight_or_contract_steeply_have_their_radius():
    still = spectrum(torch.ones(2, 6, 8))
    assert still.radius.tolist() == [0.0, 0.0] and still.residual.tolist() == [1.0, 1.0]
    rest = spectrum(torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.5, 0.0], [1.5, 0.0]]], dtype=torch.float64))
    assert (float(rest.radius), float(rest.angle), float(rest.residual)) == (0.0, 0.0, 1.0)
    line = torch.arange(5.0)[:, None] * torch.ones(8)
    assert float(spectrum(line[None]).radius) == pytest.approx(1.0)
    assert float(spectrum((0.5 ** torch.arange(5.0))[:, None] * torch.ones(8)[None, None]).radius) == pytest.approx(0.5)
    # each step along an axis that holds nothing else, towards a state of zeros there
    path = torch.zeros(1, 6, 1, dtype=torch.float64)
    path[0, :, 0] = 1e-9 ** torch.arange(6, dtype=torch.float64)
    assert float(spectrum(path).radius) == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 8), (4, 8), (1, 2, 5, 8)])
def test_too_few_states_are_refused(shape):
    with pytest.raises(ValueError, match="loop states are"):
        spectrum(torch.zeros(shape))


@pytest.mark.parametrize("kind", [4, 2, "sandwich", "pre", "post"])
def test_the_jacobian_radius_is_that_of_the_dense_jacobian(kind):
    """Of Ouro with so many heads of K/V; and of Raven, whose loops read an injection besides, which is held."""
    is_raven = isinstance(kind, str)
    model = tiny_raven(kind, 3) if is_raven else tiny_model(3, num_key_value_heads=kind, total_ut_steps=4)
    ids, cache = torch.tensor([[5, 9, 2, 7, 11]]), model.double().new_cache()
    with torch.no_grad():
        outputs = model(ids, past_key_values=cache, exit_config={"mode": "full"}, output_loop_states=True)
    states, injected = outputs.loop_states, outputs.injected[0, -1] if is_raven else None
    for plane in (2,) if is_raven else (1, 3):
        hidden = states[plane - 1, 0, -1]
        rows = _OnePosition(cache, plane, 4)

        def loop(state, rows=rows):
            if is_raven:
                return model.loop(torch.cat([state, injected])[None], rows)[0, : len(state)]
            return model.norm(model.loop(state[None], rows))[0]

        torch.testing.assert_close(loop(hidden), states[plane, 0, -1])
        exact = torch.linalg.eigvals(torch.func.jacrev(loop)(hidden)).abs().max()
        radius = jacobian_radius(model, hidden, cache, plane, 4, injected=injected)
        assert radius == pytest.approx(float(exact), rel=1e-3)


@pytest.mark.parametrize("mode", ["full", "qexit"])
def test_recorded_statistics_give_the_fates_again(mode):
    model = tiny_model(seed=3, total_ut_steps=7)
    for growth, spiral in ((0.1, 60.0), (0.02, 40.0), (0.5, 110.0)):
        model.generation_config.fate_config = {"growth": growth, "spiral": spiral}
        out = model.generate(
            torch.arange(9, 21)[None], max_new_tokens=12, exit_config={"mode": mode, "after_exit": "drop"},
            output_statistics=True, return_dict_in_generate=True,
        )  # fmt: skip
        again = fates_under(out.loop_statistics, FateConfig(growth, spiral))
        assert torch.equal(again, out.loop_fates.long())
        assert mode == "full" or (out.loop_fates[..., -1] == 0).any(), "no loop was left out: that was not tested"


def test_a_standstill_hides_no_later_divergence():
    angles = torch.tensor([0.0, 0.3, 0.3, 0.3, 0.4, 0.6, 1.1])  # as after a norm, states of one length
    states = torch.stack([angles.cos(), angles.sin()], dim=-1)
    ends = run_loops(states, ExitParams("none", 0.5, 99))
    statistics = torch.stack([end.statistics[0] for end in ends])
    live = [int(end.fates) for end in ends]
    assert live[-1] == FATES.index("diverge")
    assert fates_under(statistics, FateConfig()).tolist() == live


def test_growth_is_measured_against_the_last_three_steps():
    """Steps of 10, 1, 1, 1 and 5: the last outgrows the three before it, and not the first.

    Each goes a way of its own, so that no fit speaks.
    """
    steps = torch.diag(torch.tensor([1.0, 10.0, 1.0, 1.0, 1.0, 5.0]))
    states = 100.0 + steps.cumsum(0)
    loops = run_loops(states, ExitParams("none", 1.0, len(steps)))
    statistics = torch.stack([loop.statistics[0] for loop in loops])
    fates = fates_under(statistics, FateConfig())
    assert fates.tolist() == [int(loop.fates[0]) for loop in loops]
    assert FATES[int(fates[-1])] == "diverge"


def test_a_path_that_begins_with_a_standstill_has_the_radius_of_its_steps():
    """Where one of two steps is none, the two are no plane, and the fit is of one step by the other."""
    steps = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.5, 1.0, 0.25]], dtype=torch.float64)
    states = torch.cat([torch.ones(1, 3, dtype=torch.float64), 1 + steps.cumsum(0)])
    radius, angle, residual, _ = definitions.spectrum(states.numpy())
    fit = spectrum(states[None])
    assert float(fit.radius) == pytest.approx(radius) == pytest.approx(0.5)
    assert float(fit.angle) == pytest.approx(angle) and float(fit.residual) == pytest.approx(residual)


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


def test_fates_begin_at_the_third_loop_and_loops_that_were_not_run_have_none():
    result = fates_under(recorded(5, angle=2.5), FateConfig(growth=0.1, spiral=60.0))
    assert [FATES[fate] for fate in result.tolist()] == [None, None, "contract", "spiral", "spiral"]
    statistics = recorded(6)
    statistics[4:] = torch.nan
    assert fates_under(statistics, FateConfig()).tolist() == [0, 0, 1, 1, 0, 0]
    batch = torch.stack([statistics, recorded(6)])[None]
    assert fates_under(batch, FateConfig()).tolist() == [[[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]]
    statistics = recorded(5, change=0.0, gain=0.0)
    statistics[-1, STATISTICS.index("change")] = 0.1
    assert last_fate(statistics) == "contract"


def test_changes_under_the_noise_of_the_dtype_are_none():
    still = recorded(6, change=4e-7, turning=2.0)
    assert last_fate(still) == "contract" and last_fate(still, torch.float64) == "spiral"
    assert last_fate(recorded(6, change=6e-7, turning=2.0)) == "spiral"


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
    assert (first.loop, first.fate, second.loop, second.fate) == (1, None, 2, "contract")
    assert [getattr(second, name) for name in STATISTICS] == statistics[1].tolist()
    assert first.to_dict()["loop"] == 1 and second.gain == pytest.approx(0.9)


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
def test_a_cache_must_hold_the_past_of_the_position_and_a_state_is_one_vector_of_three_and_more(given, plane, position):
    with pytest.raises(ValueError, match="a cache of one sequence"):
        jacobian_radius(Linear([[1.0] * 3] * 3), torch.ones(3, dtype=torch.float64), given, plane, position)
    for shape in ((2,), (3, 3), ()):
        with pytest.raises(ValueError, match="one state"):
            jacobian_radius(Linear([[1.0] * 3] * 3), torch.ones(shape), cache(), 0, 4)
