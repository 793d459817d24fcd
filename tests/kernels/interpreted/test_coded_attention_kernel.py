"""The coded-attention kernel against decode-then-attend in float64, and a row's bits in any company."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from sigma0.kernels import coded_attention_kernel, depth_attention
from sigma0.kernels.coded_attention_kernel import coded_attention
from tests.kernels.coded_cases import SCALING, SHAPES, assert_agrees, assert_rows_stand_alone, case, drawn_shapes, some
from tests.kernels.interpreted.conftest import DEVICE
from tests.marks import fast_if, slow

pytestmark = pytest.mark.usefixtures("on_device")
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# without shrinking, which takes minutes in the interpreter
few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.fixture(params=[(4, 64), (1, 2)], ids=["long parts", "many parts"])
def parts(request, monkeypatch):
    """Tiles of a part, and the most parts."""
    monkeypatch.setattr(coded_attention_kernel, "PART_TILES", request.param[0])
    monkeypatch.setattr(depth_attention, "MOST_PARTS", request.param[1])


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", [fast_if(name in ("residual", "groups of no power of two"), name) for name in SHAPES])
def test_rows_attend_as_the_formula_says_and_read_nothing_else(name):
    assert_agrees(coded_attention, SHAPES[name], 1, TOLERANCES[torch.float32], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [slow("residual"), "every width"])
def test_half_precision(name, dtype):
    assert_agrees(coded_attention, SHAPES[name], 2, TOLERANCES[dtype], dtype, device=DEVICE)


@pytest.mark.slow
@few
@given(drawn_shapes([2, 4, 8], [(16, 8), (16, 16), (32, 32), (80, 16), (128, 32), (24, 24)]))
def test_any_rows(drawn):
    assert_agrees(coded_attention, drawn[1], drawn[0], TOLERANCES[torch.float32], rows=6, device=DEVICE)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_the_bits_of_a_row_depend_on_no_other_row_and_no_bound(dtype, monkeypatch):
    monkeypatch.setattr(coded_attention_kernel, "PART_TILES", 1)
    monkeypatch.setattr(depth_attention, "MOST_PARTS", 2)
    assert_rows_stand_alone(coded_attention, dtype, DEVICE)


def test_rows_that_are_nobodys_look_nothing_up():
    query, tails, coded, at = case(3, SHAPES["residual"], device=DEVICE)
    idle = torch.full_like(at.sequences, 2**40)
    nobody = replace(at, sequences=idle, planes=idle, cache_positions=torch.full_like(idle, -1), longest=1)
    assert not coded_attention(query, tails, coded, nobody, SCALING).any()
    assert coded_attention(query[:0], tails, coded, some(at, slice(4, 5)), SCALING).shape == query[:0].shape


def test_strided_queries():
    query, tails, coded, at = case(4, SHAPES["residual"], device=DEVICE)
    apart = torch.stack([query, torch.full_like(query, torch.nan)], dim=2)[:, :, 0]
    expected = coded_attention(query, tails, coded, at, SCALING)
    assert torch.equal(coded_attention(apart, tails, coded, at, SCALING), expected)


def test_what_does_not_fit_is_refused():
    query, tails, coded, at = case(1, SHAPES["residual"], device=DEVICE)
    _, _, others, _ = case(1, SHAPES["every width"], device=DEVICE)
    short = replace(at, seen=at.seen[:, :3])
    turned = replace(at, blocks=at.blocks.t().contiguous().t())
    for bad, message in (
        ((query, tails, [coded[0], others[1]], at), "coded keys and values"),
        ((query[:, :3], tails, coded, at), "coded keys and values"),
        ((query, [tails[0], tails[1][1:]], coded, at), "tails"),
        ((query, [tail.transpose(1, 2).contiguous().transpose(1, 2) for tail in tails], coded, at), "contiguous"),
        ((query.half(), tails, coded, at), "one dtype"),
        ((query.double(), [tail.double() for tail in tails], coded, at), "float32, float16 and bfloat16"),
        ((query.transpose(1, 2).contiguous().transpose(1, 2), tails, coded, at), "side by side"),
        ((query, tails, coded, turned), "cache positions of blocks"),
        ((query, tails, coded, short), "seen knows 3 cache positions"),
    ):
        with pytest.raises(ValueError, match=message):
            coded_attention(*bad, SCALING)
