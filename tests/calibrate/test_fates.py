"""Fates of a model's ordinary course."""

import torch

from sigma0.calibrate.fates import fit_fates, fit_spiral_share
from sigma0.config import FateConfig
from sigma0.decode.ops import STATISTICS


def paths(gains, turnings=None, loops=6):
    """Statistics of tokens of given gains from loop 3 on, each `[n, T, 8]`."""
    found = torch.zeros(len(gains), loops, len(STATISTICS))
    found[..., STATISTICS.index("residual")] = 1.0
    found[..., STATISTICS.index("change")] = 0.3
    found[:, 2:, STATISTICS.index("gain")] = torch.tensor(gains)
    if turnings is not None:
        found[:, 2:, STATISTICS.index("turning")] = torch.deg2rad(torch.tensor(turnings))
    return found


def test_fates_leave_the_ordinary_course_alone():
    calm = [0.9, 0.9, 0.9, 0.9]
    assert fit_fates([paths([calm, calm])]) == FateConfig()
    # two steps running, each 1.25 times as long as the longest before it
    assert fit_fates([paths([calm, [1.25, 1.25, 0.9, 0.9]])]).growth == 0.3
    # growing, but once only
    assert fit_fates([paths([calm, [4.0, 0.9, 0.9, 0.9]])]).growth == 0.1
    turning = [[80.0] * 4] + [[10.0] * 4] * 9
    assert fit_fates([paths([calm] * 10, turning)]).spiral == 90.0
    assert fit_fates([paths([calm] * 30, [[80.0] * 4] + [[10.0] * 4] * 29)]).spiral == 60.0


def test_the_share_of_spiralling_tokens():
    calm, wild = ["contract"] * 4, ["spiral"] * 4
    assert fit_spiral_share([calm] * 99 + [wild]) == 0.25
    assert fit_spiral_share([calm, wild]) == 1.0


def test_three_loops_have_a_fate():
    turning = paths([[0.9]] * 10, [[170.0]] * 10, loops=3)
    assert fit_fates([turning], patience=1).spiral == 180.0
