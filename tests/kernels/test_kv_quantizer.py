"""Numbers in few bits: bounds of the round trip, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.kv_quantizer import WIDTHS, CodedPlanes, KVQuantizer, decode, encode

NUMBERS = st.integers(-(10**6), 10**6).map(lambda number: number / 997)


def bound(numbers, bits):
    """Of the error of a group in the 2-norm: half a step of the scale that spans it, rounded to bfloat16."""
    scale = np.abs(numbers).max() / (2 ** (bits - 1) - 0.5)
    # of one bit there is no step between levels: a number is off by its size at the most
    worst = np.abs(numbers).max() if bits == 1 else scale / 2
    return math.sqrt(len(numbers)) * worst * (1 + 2**-6) + np.abs(numbers).max() * 2**-7 + 1e-37


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIDTHS), st.lists(NUMBERS, min_size=16, max_size=16))
def test_a_group_comes_back_within_half_a_step(bits, numbers):
    x = torch.tensor(numbers, dtype=torch.float32)
    codes, scales = encode(x, bits, 16)
    assert codes.shape == (16 * bits // 8,) and scales.shape == (1,)
    result = decode(codes, scales, bits, 16).double().numpy()
    assert np.linalg.norm(result - x.double().numpy()) <= bound(x.double().numpy(), bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_constants_zeros_and_an_outlier(bits):
    zeros = torch.zeros(3, 16)
    assert torch.equal(decode(*encode(zeros, bits, 8), bits, 8), zeros)
    for value in (1.0, -3.7, 1e-20, 1e20):
        same = torch.full((16,), value)
        torch.testing.assert_close(decode(*encode(same, bits, 16), bits, 16), same, rtol=2**-7, atol=0)
    outlier = torch.full((16,), 0.01)
    outlier[5] = 100.0
    result = decode(*encode(outlier, bits, 16), bits, 16)
    assert float((result - outlier).norm()) <= bound(outlier.double().numpy(), bits)
    assert bits == 1 or float(result[5]) > 30, "the least squares of fifteen small numbers and a large one"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_are_refused_and_nothing_is_written(value):
    codec = KVQuantizer((2, 4), 1, 8)
    planes = CodedPlanes(codec, 3, 1, 8, torch.device("cpu"))
    planes.write(torch.tensor([1]), [torch.ones(1, 1, 8)] * 2)
    kept = planes.codes.clone(), planes.scales.clone()
    wrong = torch.ones(1, 1, 8)
    wrong[0, 0, 3] = value
    for numbers in ([wrong, torch.ones(1, 1, 8)], [torch.ones(1, 1, 8), wrong]):
        with pytest.raises(ValueError, match="infinite or NaN cannot be stored"):
            planes.write(torch.tensor([1]), numbers)
    assert torch.equal(kept[0], planes.codes) and torch.equal(kept[1], planes.scales)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=5), st.booleans(), st.sampled_from([8, 16, 32]))
def test_residuals_are_to_the_decoded_anchor(bits, anchored, group):
    generator = torch.Generator().manual_seed(len(bits))
    codec = KVQuantizer(tuple(bits), len(bits) - 1 if anchored else None, group)
    planes = CodedPlanes(codec, 5, 2, 32, torch.device("cpu"))
    numbers = [torch.randn(2, 2, 32, generator=generator) for _ in bits]
    at = torch.tensor([4, 1])
    planes.write(at, numbers)
    assert planes.nbytes == 5 * 2 * codec.head_bytes(32)
    assert codec.head_bytes(32) * 8 / (32 * len(bits)) == pytest.approx(codec.number_bits)
    anchor = planes.read(len(bits) - 1, at) if anchored else None
    for plane, current in enumerate(numbers):
        stored = current if anchor is None or plane == len(bits) - 1 else current - anchor
        expected = decode(*encode(stored, bits[plane], group), bits[plane], group)
        expected = expected if stored is current else expected + anchor
        torch.testing.assert_close(planes.read(plane, at), expected)
    assert not planes.read(0, torch.tensor([0])).any(), "what nobody wrote is zero"


def test_codecs_that_cannot_be_are_named():
    for bits, anchor, group, message in (
        ((3,), None, 16, "1, 2, 4, 8 bits, got"),
        ((), None, 16, "1, 2, 4, 8 bits, got"),
        ((2, 4), 2, 16, "one of 2 planes, got 2"),
        ((2, 4), 1, 12, "multiple of 8 numbers, got 12"),
    ):
        with pytest.raises(ValueError, match=message):
            KVQuantizer(bits, anchor, group)
    with pytest.raises(ValueError, match="heads of 24 numbers are no whole number of groups of 16"):
        CodedPlanes(KVQuantizer((2,)), 3, 1, 24, torch.device("cpu"))
