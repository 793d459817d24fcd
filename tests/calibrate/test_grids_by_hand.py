"""Grids and shares of calibrations, met one by one."""

from dataclasses import replace

import pytest
import torch

from sigma0.calibrate.fates import fit_fates, fit_spiral_share, token_fates
from sigma0.calibrate.kv import codecs_of, coded_share
from sigma0.calibrate.risk import check_promise, split
from sigma0.calibrate.teacher_forcing import ForcedText
from sigma0.config import FateConfig, KVConfig
from sigma0.decode.kv_store import BlockShape
from sigma0.decode.ops import STATISTICS
from tests.signals.test_trajectory import recorded


def test_three_loops_have_a_fate_and_what_outgrows_the_grid_its_end():
    assert fit_fates([recorded(6, residual=1.0, gain=99.0)[None]]).growth == 10.0
    assert fit_fates([recorded(6, residual=1.0, turning=3.15)[None]]).spiral == 180.0
    assert fit_fates([torch.full((1, 6, 8), torch.nan)]) == FateConfig(0.1, 60.0), "no loop was run"
    turning = paths([[0.9]] * 10, [[170.0]] * 10, loops=3)
    assert fit_fates([turning], patience=1).spiral == 180.0


def test_the_fate_of_a_token_is_the_mildest_of_its_last_loops():
    path = recorded(6, residual=1.0, turning=2.0)[None]
    path[0, 4, 3] = 0.1
    settings = FateConfig(0.1, 60.0)
    assert token_fates(path, settings, torch.float32, 1) == ["spiral"]
    assert token_fates(path, settings, torch.float32, 2) == ["contract"]
    assert token_fates(path, settings, torch.float32, 4) == ["contract"]
    assert token_fates(path, settings, torch.float32, 5) == [None], "the first two loops have no fate"


def looping(loops):
    return BlockShape(2, loops, 2, 32, 1)


def test_codecs_go_from_many_bits_to_few():
    result = codecs_of(looping(4), 32)
    assert {(kv.codec, kv.bits, kv.group) for kv in result} == {
        (kv.codec, kv.bits, kv.group)
        for kv in (
            KVConfig(codec="int8"), KVConfig(codec="int4"), KVConfig(codec="int4", group=32),
            KVConfig(codec="residual", bits=(4, 4, 2, 4)), KVConfig(codec="residual", bits=(2, 2, 2, 8)),
            KVConfig(codec="residual"), KVConfig(codec="residual", group=32),
            KVConfig(codec="residual", bits=(1, 1, 1, 4), group=32),
            KVConfig(codec="residual", bits=(1, 1, 1, 2), group=32),
            KVConfig(codec="residual", bits=(1, 1, 1, 1), group=32),
        )
    }  # fmt: skip
    assert {kv.segment for kv in result} == {32} and len(result) == len(set(result))
    assert result[0] == KVConfig(codec="int8", segment=32) and result[-1].bits == (1, 1, 1, 1)
    assert codecs_of(looping(3))[0].segment == KVConfig().segment
    assert (4, 2, 4) in [kv.bits for kv in codecs_of(looping(3))]
    for loops in (1, 2, 4, 7):
        for shape in (looping(loops), replace(looping(loops), stages=(1, 1))):
            sizes = [shape.number_bits(kv) for kv in codecs_of(shape)]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] == 9 and sizes[-1] < 3


@pytest.mark.parametrize("segment, share", [(4, 20 / 30), (1, 26 / 30), (5, 20 / 30), (8, 8 / 30), (9, 0.0)])
def test_what_new_tokens_are_read_over_is_coded_in_whole_segments(segment, share):
    """Of ten ids the last four are new, which are read at positions 5 to 8."""
    assert coded_share(ForcedText(tuple(range(10)), 4), segment) == pytest.approx(share)


@pytest.mark.parametrize("risk, confidence, tested", [(0.5, 0.9, 4), (0.1, 0.95, 29), (0.05, 0.8, 32)])
def test_a_risk_needs_so_many_answers_without_one_wrong(risk, confidence, tested):
    fewest = next(count for count in range(1, 500) if round(0.8 * count) - round(0.2 * count) >= tested)
    check_promise(fewest, risk, confidence)
    assert split(50) == ((0, 10), (10, 40), (40, 50)) and split(7) == ((0, 1), (1, 6), (6, 7))
    for value in (0.0, 1.0, -0.1):
        for wrong in ((value, 0.9), (0.5, value)):
            with pytest.raises(ValueError, match="is not between 0 and 1"):
                check_promise(100, *wrong)
    with pytest.raises(ValueError, match=f"{tested} answers without one wrong"):
        check_promise(fewest - 1, risk, confidence)


def paths(gains, turnings=None, loops=6):
    """Statistics of tokens of given gains from loop 3 on, each `[n, T, 8]`."""
    result = torch.zeros(len(gains), loops, len(STATISTICS))
    result[..., STATISTICS.index("residual")] = 1.0
    result[..., STATISTICS.index("change")] = 0.3
    result[:, 2:, STATISTICS.index("gain")] = torch.tensor(gains)
    if turnings is not None:
        result[:, 2:, STATISTICS.index("turning")] = torch.deg2rad(torch.tensor(turnings))
    return result


# The settings that are tried, from those that raise most alarms on.
GROWTHS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
ANGLES = (60.0, 75.0, 90.0, 105.0, 120.0, 150.0, 180.0)


def test_growths_angles_and_shares_are_the_least_that_few_exceed():
    for growth, next_one in zip(GROWTHS, (*GROWTHS[1:], GROWTHS[-1]), strict=True):
        below, above = 1 + growth - 0.01, 1 + growth + 0.01
        assert fit_fates([paths([[below, below, 0.9, 0.9]])]).growth == growth
        assert fit_fates([paths([[above, above, 0.9, 0.9]])]).growth == next_one
    calm = [0.9] * 4
    for angle, next_one in zip(ANGLES, (*ANGLES[1:], ANGLES[-1]), strict=True):
        for turning, fitted in ((angle - 0.5, angle), (angle + 0.5, next_one)):
            assert fit_fates([paths([calm] * 10, [[turning] * 4] + [[10.0] * 4] * 9)]).spiral == fitted
    # one of twenty may spiral, and one of nineteen may not
    for tokens, fitted in ((20, 60.0), (19, 120.0)):
        turnings = [[110.0] * 4] + [[10.0] * 4] * (tokens - 1)
        assert fit_fates([paths([calm] * tokens, turnings)]).spiral == fitted
    for spiralling, share in ((1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)):
        answer = ["spiral"] * spiralling + ["contract"] * (4 - spiralling)
        assert fit_spiral_share([answer] * 10) == share
    most = ["spiral", "spiral", "spiral", "contract"]
    calm = ["contract"] * 4
    assert fit_spiral_share([most] + [calm] * 19) == 0.25 and fit_spiral_share([most] + [calm] * 18) == 0.75
