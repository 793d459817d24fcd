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


# The settings that are tried, from those that raise most alarms on.
GROWTHS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
ANGLES = (60.0, 75.0, 90.0, 105.0, 120.0, 150.0, 180.0)


def test_the_growth_is_the_least_that_no_token_exceeds_twice_running():
    for growth, next_one in zip(GROWTHS, (*GROWTHS[1:], GROWTHS[-1]), strict=True):
        below, above = 1 + growth - 0.01, 1 + growth + 0.01
        assert fit_fates([paths([[below, below, 0.9, 0.9]])]).growth == growth
        assert fit_fates([paths([[above, above, 0.9, 0.9]])]).growth == next_one


def test_the_angle_is_the_least_that_few_tokens_exceed():
    calm = [0.9] * 4
    for angle, next_one in zip(ANGLES, (*ANGLES[1:], ANGLES[-1]), strict=True):
        for turning, fitted in ((angle - 0.5, angle), (angle + 0.5, next_one)):
            assert fit_fates([paths([calm] * 10, [[turning] * 4] + [[10.0] * 4] * 9)]).spiral == fitted
    # one of twenty may spiral, and one of nineteen may not
    for tokens, fitted in ((20, 60.0), (19, 120.0)):
        turnings = [[110.0] * 4] + [[10.0] * 4] * (tokens - 1)
        assert fit_fates([paths([calm] * tokens, turnings)]).spiral == fitted


def test_a_spiral_share_is_the_least_that_few_answers_exceed():
    for spiralling, share in ((1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)):
        answer = ["spiral"] * spiralling + ["contract"] * (4 - spiralling)
        assert fit_spiral_share([answer] * 10) == share
    most = ["spiral", "spiral", "spiral", "contract"]
    calm = ["contract"] * 4
    assert fit_spiral_share([most] + [calm] * 19) == 0.25 and fit_spiral_share([most] + [calm] * 18) == 0.75
