"""Query, key and value, MLP and norms of a few rows: against float64, and bit by bit whatever stands beside a row."""

import math
import random
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sigma0.kernels import row_product
from sigma0.kernels.row_gated import row_gated, row_gated_reference
from sigma0.kernels.row_linear import row_linear, row_parts
from sigma0.kernels.row_norm_kernel import row_norm, row_norm_reference, row_residual, row_residual_reference
from sigma0.kernels.row_product import Tiling
from sigma0.kernels.row_qkv import row_qkv, row_qkv_reference
from tests.kernels.interpreted.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("on_device")

EPSILON, LOOPS, PLACES, POSITIONS = 1e-5, 3, 40, 60
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
# without shrinking, which takes minutes in the interpreter
few = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def randoms(seed, dtype, *shapes):
    """Numbers of variance 1 over the last dimension's length; of rows, of 1."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) / (math.sqrt(shape[-1]) if len(shape) > 1 else 1)).to(dtype)
        for shape in shapes
    ]


def tables(width, dtype):
    angles = torch.arange(POSITIONS)[:, None] / 10_000 ** (torch.arange(width // 2) * 2 / width)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=1).to(dtype), torch.cat([-sin, sin], dim=1).to(dtype)


def places(seed, rows):
    """Positions of rows, and where each writes; every third is nobody's."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator)
    flat = torch.randperm(LOOPS * PLACES, generator=generator)[:rows]
    flat[torch.arange(rows) % 3 == 1] = -1
    return positions, flat


def planes(kv_heads, width, dtype):
    return [torch.full((LOOPS, PLACES, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]


def defined_norm(row, weight):
    return row / (row.square().mean() + EPSILON).sqrt() * weight


def defined_qkv(hidden, weight, heads, kv_heads, width, positions):
    """q, k, v of every row in float64, one row, head and pair of numbers at a time."""
    angles = 1 / 10_000 ** (torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    rows = []
    for row, position in zip(hidden.double(), positions.tolist(), strict=True):
        item = (weight.double() @ row).view(-1, width).clone()
        for head in range(heads + kv_heads):
            turned = torch.complex(item[head, : width // 2], item[head, width // 2 :])
            turned = turned * torch.polar(torch.ones_like(angles), position * angles)
            item[head] = torch.cat([turned.real, turned.imag])
        rows.append(item)
    return torch.stack(rows).split([heads, kv_heads, kv_heads], dim=1)


def within(result, plain, expected, roundings, slack=0.0):
    """At most twice the error of plain torch, and two steps of the dtype.

    Triton's interpreter cuts bfloat16 off instead of rounding it: a step each time, all in one direction.
    """
    steps = roundings if result.dtype == torch.bfloat16 and DEVICE == "cpu" else 2
    step = steps * torch.finfo(result.dtype).eps * max(1.0, float(expected.abs().max()))
    allowed = 2 * float((plain.double() - expected).abs().max()) + step + slack
    assert float((result.double() - expected).abs().max()) <= allowed


@few
@given(
    st.integers(0, 2**16),
    DTYPES,
    st.sampled_from([1, 5, 17]),
    st.sampled_from([48, 200]),
    st.sampled_from([(2, 2), (3, 1)]),
    st.sampled_from([8, 40]),
)
def test_query_key_and_value(seed, dtype, rows, width, heads_of, head_width):
    heads, kv_heads = heads_of
    hidden, weight = randoms(seed, dtype, (rows, width), ((heads + 2 * kv_heads) * head_width, width))
    hidden = hidden * math.sqrt(width)
    positions, flat = places(seed, rows)
    cos, sin = tables(head_width, dtype)
    result, plain = planes(kv_heads, head_width, dtype), planes(kv_heads, head_width, dtype)
    shared = (hidden, weight, cos, sin, positions)
    with drawn_tiling(seed, dtype):
        query = row_qkv(*shared, *result, flat)
    plain_query = row_qkv_reference(*shared, *plain, flat)
    expected = defined_qkv(hidden, weight, heads, kv_heads, head_width, positions)
    # the tables themselves are rounded
    slack = torch.finfo(dtype).eps * float(expected[0].abs().max())
    within(query, plain_query, expected[0], 4, slack)
    live = flat >= 0
    untouched = torch.ones(LOOPS * PLACES, dtype=torch.bool)
    untouched[flat[live]] = False
    for ours, theirs, item in zip(result, plain, expected[1:], strict=True):
        ours, theirs = ours.flatten(0, 1), theirs.flatten(0, 1)
        within(ours[flat[live]], theirs[flat[live]], item[live], 4, slack)
        assert ours[untouched].isnan().all() and theirs[untouched].isnan().all()


@few
@given(
    st.integers(0, 2**16),
    DTYPES,
    st.sampled_from([1, 5, 17]),
    st.sampled_from([24, 200]),
    st.sampled_from([40, 150]),
)
def test_gates(seed, dtype, rows, width, inner):
    hidden, gate_up = randoms(seed, dtype, (rows, width), (2 * inner, width))
    hidden = hidden * math.sqrt(width)
    gates, ups = (hidden.double() @ gate_up.double().T).chunk(2, dim=1)
    with drawn_tiling(seed, dtype):
        result = row_gated(hidden, gate_up)
    within(result, row_gated_reference(hidden, gate_up), gates / (1 + (-gates).exp()) * ups, 4)


@few
@given(
    st.integers(0, 2**16),
    DTYPES,
    st.sampled_from([1, 5, 17]),
    st.sampled_from([24, 200, 700]),
    st.sampled_from([1, 40, 150]),
    st.booleans(),
)
def test_product_and_norm(seed, dtype, rows, width, outputs, added):
    hidden, weight, norm, residual = randoms(seed, dtype, (rows, width), (outputs, width), (width,), (rows, width))
    # rows that do not follow each other in memory
    wide = torch.cat([hidden, hidden], dim=1)[:, :width]
    exact = hidden.double() @ weight.double().T
    plain = torch.nn.functional.linear(hidden, weight)
    with drawn_tiling(seed, dtype) as tiling:
        parts = row_parts(wide, weight)
        assert parts.shape == (tiling.splits, rows, outputs) and parts.dtype == torch.float32
        within(parts.sum(0).to(dtype), plain, exact, 2)
    with drawn_tiling(seed, dtype, splits=1):
        within(row_linear(wide, weight), plain, exact, 2)
    kept = residual if added else None
    expected = torch.stack([defined_norm(row, norm.double()) for row in hidden.double()])
    expected = expected + residual.double() if added else expected
    plain = row_norm_reference(hidden, norm, EPSILON, kept)
    within(row_norm(wide, norm, EPSILON, kept), plain, expected, 3)


@few
@given(
    st.integers(0, 2**16),
    DTYPES,
    st.sampled_from([1, 5, 17]),
    st.sampled_from([24, 200]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
)
def test_parts_and_residual(seed, dtype, rows, width, splits, normed, goes_on):
    residual, after, ahead = randoms(seed, dtype, (rows, width), (width,), (width,))
    (parts,) = randoms(seed + 1, torch.float32, (splits, rows, width))
    after, ahead = after if normed else None, ahead if goes_on else None
    added = parts.double().sum(0)
    if after is not None:
        added = torch.stack([defined_norm(row, after.double()) for row in added])
    summed = residual.double() + added
    arguments = (parts, after, torch.cat([residual, residual], dim=1)[:, :width], ahead, (EPSILON, EPSILON))
    result, plain = row_residual(*arguments), row_residual_reference(*arguments)
    within(result[0], plain[0], summed, 4)
    if ahead is None:
        assert result[1] is result[0]
    else:
        # of the same residual: a norm feels how it was rounded
        expected = torch.stack([defined_norm(row, ahead.double()) for row in result[0].double()])
        within(result[1], row_norm_reference(result[0], ahead, EPSILON), expected, 4)


@contextmanager
def drawn_tiling(seed, dtype, splits=None):
    """Every product divided in one drawn way."""
    draw = random.Random(seed)
    steps = (16, 64) if dtype == torch.float32 else (32, 128)
    tiling = Tiling(draw.choice((16, 32, 64)), draw.choice(steps), 4, 2, splits or draw.choice((1, 2, 4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_product, "_tiling", lambda *_: tiling)
        yield tiling


def in_order(left, right, dtype):
    """A product of matrices in which every number is summed in the order of the inner dimension."""
    return (left.astype(dtype)[:, :, None] * right.astype(dtype)[None]).sum(axis=1)


@pytest.fixture
def products_in_order(monkeypatch):
    """The interpreter multiplies with BLAS, whose order of summation depends on a row's place; a GPU is as it is."""
    if DEVICE == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", in_order)


@pytest.mark.usefixtures("products_in_order")
@few
@given(st.integers(0, 2**16), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 40), st.data())
def test_bits_of_a_row_do_not_depend_on_its_neighbours(seed, dtype, rows, data):
    """Each of three rows alone, and then at some place of a pass of R rows."""
    width, inner, vocabulary, head_width = 140, 24, 130, 16
    hidden, norm, weight, gate_up, down, head = randoms(
        seed, dtype, (rows, width), (width,), (3 * head_width, width), (2 * inner, width), (width, inner),
        (vocabulary, width),
    )  # fmt: skip
    hidden = hidden * math.sqrt(width)
    positions, _ = places(seed, rows)
    flat = torch.arange(rows) + PLACES
    cos, sin = tables(head_width, dtype)

    def run(which):
        keys, values = planes(1, head_width, dtype)
        query = row_qkv(hidden[which], weight, cos, sin, positions[which], keys, values, flat[which])
        parts = row_parts(row_gated(hidden[which], gate_up), down)
        summed, ahead = row_residual(parts, norm, hidden[which], norm, (EPSILON, EPSILON))
        output = row_norm(ahead, norm, EPSILON, summed)
        logits = row_linear(output, head)
        written = [part.flatten(0, 1)[flat[which]] for part in (keys, values)]
        return [query, *written, output, logits]

    order = torch.tensor(data.draw(st.permutations(range(rows))))
    together = run(order)
    for place in data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3, unique=True)):
        for alone, beside in zip(run(order[place : place + 1]), together, strict=True):
            assert torch.equal(alone[0], beside[place])


def residual_of(*arguments):
    """The norms with their epsilons one by one."""
    return row_residual(*arguments[:4], arguments[4:])


def calls(rows=5, dtype=torch.float32):
    """A call of every operator and its arguments, as the operator takes them."""
    width, head_width = 32, 8
    hidden, norm, weight, gate_up, head = randoms(
        3, dtype, (rows, width), (width,), (4 * head_width, width), (48, width), (70, width)
    )  # fmt: skip
    positions, flat = places(3, rows)
    qkv = (hidden, weight, *tables(head_width, dtype), positions, *planes(1, head_width, dtype), flat)
    return {
        "row_qkv": (row_qkv, qkv),
        "row_linear": (row_linear, (hidden, head)),
        "row_norm": (row_norm, (hidden, norm, EPSILON, hidden * 2)),
        "row_parts": (row_parts, (hidden, head)),
        "row_gated": (row_gated, (hidden, gate_up)),
        "row_residual": (residual_of, (torch.stack([hidden, hidden]).float(), norm, hidden, norm, EPSILON, EPSILON)),
    }


def test_what_is_compiled_ahead_is_not_run():
    class Kernel:
        def __init__(self):
            self.compiled, self.ran = [], []

        def warmup(self, *arguments, grid, **options):
            self.compiled.append((arguments, grid, options["STEP"]))

        def __getitem__(self, grid):
            return lambda *arguments, **options: self.ran.append((arguments, grid, options["STEP"]))

    kernel, like = Kernel(), torch.zeros(1)
    with row_product.compiled_together():
        row_product.start(kernel, (3,), like, 1, 2, STEP=16)
    assert kernel.compiled == [((1, 2), (3,), 16)] and not kernel.ran
    row_product.start(kernel, (3,), like, 1, 2, STEP=16)
    assert kernel.ran == kernel.compiled and len(kernel.compiled) == 1


def test_no_rows_are_no_fault():
    for function, arguments in calls(rows=0).values():
        output = function(*arguments)
        assert all(part.numel() == 0 for part in (output if isinstance(output, tuple) else (output,)))


def test_what_does_not_fit_is_refused():
    result = {name: arguments for name, (_, arguments) in calls().items()}
    qkv, linear, norm, gated = (result[name] for name in ("row_qkv", "row_linear", "row_norm", "row_gated"))
    residual = result["row_residual"]
    for function, arguments, place, bad, message in (
        (row_qkv, qkv, 0, qkv[0].double(), "one dtype"),
        (row_qkv, qkv, 1, qkv[1][:-1], "no heads of 8"),
        (row_qkv, qkv, 2, qkv[2][:, :4], "tables of 8"),
        (row_qkv, qkv, 4, qkv[4].int(), "positions must be int64"),
        (row_qkv, qkv, 4, torch.stack([qkv[4], qkv[4]], dim=1)[:, 0], "side by side, got"),
        (row_qkv, qkv, 5, qkv[5].transpose(0, 1), "contiguous planes"),
        (row_qkv, qkv, 7, qkv[7][:3], "flat_rows must be int64"),
        (row_linear, linear, 1, linear[1].bfloat16(), "one dtype"),
        (row_linear, linear, 0, linear[0][:, :8], "no product"),
        (row_norm, norm, 1, norm[1][:4], "its weight is"),
        (row_norm, norm, 3, norm[3][:4], "no norm of rows"),
        (row_norm, norm, 3, norm[3].double(), "one dtype"),
        (row_gated, gated, 0, gated[0].t().contiguous().t(), "side by side"),
        (row_gated, gated, 1, gated[1][:5], "as many"),
        (residual_of, residual, 0, residual[0][:, :3], "no parts"),
        (residual_of, residual, 0, residual[0].double(), "parts in float32"),
        (residual_of, residual, 3, residual[3][:4], "its weight is"),
        (residual_of, residual, 2, residual[2].double(), "parts in float32"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments[:place], bad, *arguments[place + 1 :])
