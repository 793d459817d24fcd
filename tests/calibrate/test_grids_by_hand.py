"""Grids and shares of calibrations, met one by one."""

import pytest
import torch

from sigma0.calibrate.fates import fit_fates, fit_spiral_share, token_fates
from sigma0.calibrate.kv import codecs_of, coded_share
from sigma0.calibrate.risk import check_promise, split
from sigma0.calibrate.teacher_forcing import ForcedText
from sigma0.config import FateConfig, KVConfig
from sigma0.signals.verdict import DoorPolicy
from tests.signals.test_recorded_loops import recorded

NEVER = 1e9


@pytest.mark.parametrize("growth", [0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0])
def test_the_growth_is_the_least_at_which_no_loop_diverges_twice_running(growth):
    path = recorded(6, residual=1.0, gain=1 + growth - 0.01)[None]
    assert fit_fates([path]).growth == growth
    # once is no divergence of the model
    once = recorded(6, residual=1.0)[None]
    once[0, 3, 2] = 1 + NEVER
    assert fit_fates([once]).growth == 0.1


@pytest.mark.parametrize("angle", [60.0, 75.0, 90.0, 105.0, 120.0, 150.0, 180.0])
def test_the_angle_is_the_least_at_which_few_tokens_spiral(angle):
    turning = torch.pi * (angle - 1) / 180
    calm, turned = (recorded(6, residual=1.0, turning=each)[None] for each in (0.1, turning))
    assert fit_fates([turned]).spiral == angle
    assert fit_fates([calm] * 19 + [turned]).spiral == 60.0, "one of twenty may spiral"
    assert fit_fates([calm] * 18 + [turned]).spiral == angle


def test_what_outgrows_the_grid_has_its_end():
    assert fit_fates([recorded(6, residual=1.0, gain=99.0)[None]]).growth == 10.0
    assert fit_fates([recorded(6, residual=1.0, turning=3.15)[None]]).spiral == 180.0
    assert fit_fates([torch.full((1, 6, 8), torch.nan)]) == FateConfig(0.1, 60.0), "no loop was run"


def test_the_fate_of_a_token_is_the_mildest_of_its_last_loops():
    path = recorded(6, residual=1.0, turning=2.0)[None]
    path[0, 4, 3] = 0.1
    settings = FateConfig(0.1, 60.0)
    assert token_fates(path, settings, torch.float32, 1) == ["spiral"]
    assert token_fates(path, settings, torch.float32, 2) == ["contract"]
    assert token_fates(path, settings, torch.float32, 4) == ["contract"]
    assert token_fates(path, settings, torch.float32, 5) == [None], "the first two loops have no fate"


@pytest.mark.parametrize(
    "spiralling, share", [(0, 0.25), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)], ids=lambda value: str(value)
)
def test_the_share_of_spirals_is_the_least_that_few_answers_exceed(spiralling, share):
    answer = ["spiral"] * spiralling + ["contract"] * (4 - spiralling)
    assert fit_spiral_share([answer]) == share
    assert fit_spiral_share([["contract"]] * 19 + [answer]) == 0.25, "one of twenty may exceed it"
    assert fit_spiral_share([["contract"]] * 18 + [answer], DoorPolicy(tau_c=0.7)) == share


def test_codecs_go_from_many_bits_to_few():
    found = codecs_of(4, 32)
    assert {(kv.codec, kv.bits, kv.group) for kv in found} == {
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
    assert {kv.segment for kv in found} == {32} and len(found) == len(set(found))
    assert found[0] == KVConfig(codec="int8", segment=32) and found[-1].bits == (1, 1, 1, 1)
    assert codecs_of(3)[0].segment == KVConfig().segment
    assert (4, 2, 4) in [kv.bits for kv in codecs_of(3)]


@pytest.mark.parametrize("segment, share", [(4, 20 / 30), (1, 26 / 30), (5, 20 / 30), (8, 8 / 30), (9, 0.0)])
def test_what_new_tokens_are_read_over_is_coded_in_whole_segments(segment, share):
    """Of ten ids the last four are new, which are read at positions 5 to 8."""
    assert coded_share(ForcedText(tuple(range(10)), 4), segment) == pytest.approx(share)


def test_prompts_are_split_into_a_fifth_three_fifths_and_a_fifth():
    assert split(50) == ((0, 10), (10, 40), (40, 50)) and split(7) == ((0, 1), (1, 6), (6, 7))


@pytest.mark.parametrize("risk, confidence, tested", [(0.5, 0.9, 4), (0.1, 0.95, 29), (0.05, 0.8, 32)])
def test_a_risk_needs_so_many_answers_without_one_wrong(risk, confidence, tested):
    fewest = next(count for count in range(1, 500) if round(0.8 * count) - round(0.2 * count) >= tested)
    check_promise(fewest, risk, confidence)
    with pytest.raises(ValueError, match=f"{tested} answers without one wrong"):
        check_promise(fewest - 1, risk, confidence)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1])
def test_a_risk_and_a_confidence_lie_between_nothing_and_all(value):
    for risk, confidence in ((value, 0.9), (0.5, value)):
        with pytest.raises(ValueError, match="is not between 0 and 1"):
            check_promise(100, risk, confidence)
