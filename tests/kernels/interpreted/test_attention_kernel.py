"""The depth-attention kernel against its reference, and that against one row at a time in float64."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sigma0.decode.planes import LayerPlanes, propagate_past_exits
from sigma0.kernels import depth_attention as module
from sigma0.kernels.depth_attention import DepthRows, depth_attention, depth_attention_reference
from tests.kernels.interpreted.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("on_device")


def drawn(seed, planes, batch, kv_heads, group, width, context, paged, padded, dtype, rows=5, holes=False):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    page = 16 if paged else context
    stretches = -(-context // page)
    shape = (planes, batch * stretches if paged else batch, kv_heads, page, width)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    sequences = torch.randint(0, batch, (rows,), generator=generator)
    starts = torch.randint(0, max(1, context // 3), (batch,), generator=generator) if padded else None
    cache_positions = torch.randint(0, context, (rows,), generator=generator)
    if starts is not None:
        cache_positions = torch.maximum(cache_positions, starts[sequences])
    seen = torch.rand(batch, context + 3, generator=generator) > 0.4 if holes else None
    if seen is not None:
        seen[sequences, cache_positions] = True
    at = DepthRows(
        sequences,
        cache_positions,
        torch.randint(0, planes, (rows,), generator=generator),
        starts,
        seen,
        torch.randperm(batch * stretches, generator=generator).view(batch, stretches).int() if paged else None,
        int(cache_positions.max()) + 1,
    )
    query = torch.randn(rows, kv_heads * group, width, generator=generator).to(dtype)
    return query, keys, values, at


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**16),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([1, 7, 90]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([(4, 64), (1, 64), (1, 2)]),
    st.booleans(),
)
def test_any_rows(seed, planes, batch, kv_heads, group, width, context, paged, padded, dtype, parts, holes):
    query, keys, values, at = drawn(
        seed, planes, batch, kv_heads, group, width, context, paged, padded, dtype, holes=holes
    )
    expected = depth_attention_reference(query.double(), keys.double(), values.double(), at, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_TILES", parts[0])
        patch.setattr(module, "MOST_PARTS", parts[1])
        result = depth_attention(query, keys, values, at, 0.3)
    # at most twice the error of the plain path, and one step of the dtype
    plain = depth_attention_reference(query, keys, values, at, 0.3)
    allowed = 2 * (plain.double() - expected).abs().max() + torch.finfo(dtype).eps * max(
        1.0, float(expected.abs().max())
    )
    assert float((result.double() - expected).abs().max()) <= float(allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_depend_on_no_other_row_and_no_bound(dtype, monkeypatch):
    monkeypatch.setattr(module, "PART_TILES", 1)
    monkeypatch.setattr(module, "MOST_PARTS", 2)
    query, keys, values, at = drawn(5, 3, 3, 2, 2, 64, 300, True, True, dtype)
    whole = depth_attention(query, keys, values, at, 0.3)
    for row in range(len(query)):
        alone = replace(
            at,
            sequences=at.sequences[row : row + 1],
            cache_positions=at.cache_positions[row : row + 1],
            planes=at.planes[row : row + 1],
            longest=int(at.cache_positions[row]) + 1,
        )
        assert depth_attention(query[row : row + 1], keys, values, alone, 0.3).equal(whole[row : row + 1])


def test_the_reference_is_the_formula():
    query, keys, values, at = drawn(3, 3, 2, 2, 2, 8, 20, True, True, torch.float32)
    result = depth_attention_reference(query, keys, values, at, 0.3)
    for row in range(5):
        sequence, column, plane = int(at.sequences[row]), int(at.cache_positions[row]), int(at.planes[row])
        for head in range(4):
            scores, seen = [], []
            for item in range(int(at.starts[sequence]), column + 1):
                place = (plane, int(at.block_tables[sequence, item // 16]), head // 2, item % 16)
                scores.append(float(query[row, head].double() @ keys[place].double()) * 0.3)
                seen.append(values[place].double())
            expected = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0) @ torch.stack(seen)
            torch.testing.assert_close(result[row, head].double(), expected, rtol=1e-5, atol=1e-6)


def test_what_nobody_wrote_is_not_read():
    query, keys, values, at = drawn(1, 2, 2, 1, 2, 16, 40, False, True, torch.float32)
    # rows before the start of their sequence, as nobody's may be, see nothing
    at.starts.clamp_(min=1)
    at.cache_positions[1::2] = 0
    expected = depth_attention(query, keys, values, at, 0.3)
    assert not expected[1::2].any() and expected[::2].any(dim=1).all()
    for sequence in range(2):
        mine = at.cache_positions[at.sequences == sequence]
        last = int(mine.max()) + 1 if len(mine) else 0
        for part in (keys, values):
            part[:, sequence, :, last:] = torch.nan
            part[:, sequence, :, : int(at.starts[sequence])] = torch.nan
    torch.testing.assert_close(depth_attention(query, keys, values, at, 0.3), expected)
    torch.testing.assert_close(depth_attention_reference(query, keys, values, at, 0.3), expected)


def test_what_does_not_fit_is_refused():
    query, keys, values, at = drawn(1, 2, 2, 1, 2, 16, 40, False, True, torch.float32, holes=True)
    strided = torch.stack([at.planes, at.planes], dim=1)[:, 0]
    for bad, message in (
        ((query, keys, values[:1], at), "values"),
        ((query, keys.half(), values, at), "one dtype"),
        ((query.transpose(1, 2).contiguous().transpose(1, 2), keys, values, at), "side by side"),
        ((query, keys, values, replace(at, seen=at.seen[:, :3])), "seen knows 3 cache positions"),
        ((query, keys, values, replace(at, seen=at.seen.t().contiguous().t())), "side by side"),
        ((query, keys, values, replace(at, planes=strided)), "planes must lie side by side"),
    ):
        with pytest.raises(ValueError, match=message):
            depth_attention(*bad, 0.3)


def test_the_part_that_ends_last_leaves_the_count_as_it_was(monkeypatch):
    """One buffer serves all layers of a pass."""
    monkeypatch.setattr(module, "PART_TILES", 1)
    query, keys, values, at = drawn(5, 3, 3, 2, 2, 64, 300, True, False, torch.float32)
    arrived = torch.zeros(len(query) * 2, dtype=torch.int32)
    expected = depth_attention(query, keys, values, at, 0.3)
    for _ in range(2):
        result = depth_attention(query, keys, values, replace(at, arrived=arrived), 0.3)
        assert torch.equal(result, expected) and not arrived.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_left_at_an_exit_is_copied_in_all_layers(dtype):
    generator = torch.Generator(DEVICE).manual_seed(3)
    layers = [LayerPlanes(torch.empty(3, 1, 40, dtype=dtype), 4, 2, 5) for _ in range(3)]
    for layer in layers:
        for flat in (layer.flat_keys, layer.flat_values):
            flat.copy_(torch.randn(flat.shape, generator=generator))
    expected = copy.deepcopy(layers)
    # nobody's position stands for every row that goes on
    positions, planes = torch.tensor([7, 10, 0, 10, 3]), torch.tensor([0, 3, 2, 3, 1])
    for layer in expected:
        layer.propagate_past_exit(positions, planes)
    propagate_past_exits(layers, positions, planes)
    for ours, theirs in zip(layers, expected, strict=True):
        assert torch.equal(ours.flat_keys, theirs.flat_keys) and torch.equal(ours.flat_values, theirs.flat_values)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_by_position_is_read_as_it_lies(dtype, paged):
    """Views of `[planes, positions + 1, H_kv, d]`, block by block, tell what contiguous blocks do; the last is NaN."""
    query, keys, values, at = drawn(7, 3, 3, 2, 2, 24, 45, paged, True, dtype, rows=6)
    expected = depth_attention(query, keys, values, at, 0.3)
    planes, blocks, heads, size, width = keys.shape
    views = []
    for part in (keys, values):
        flat = torch.full((planes, blocks * size + 1, heads, width), torch.nan, dtype=dtype)
        view = flat[:, :-1].unflatten(1, (blocks, size)).transpose(2, 3)
        view.copy_(part)
        assert view.data_ptr() == flat.data_ptr() and not view.is_contiguous()
        views.append(view)
    assert torch.equal(depth_attention(query, *views, at, 0.3), expected)
    assert torch.equal(
        depth_attention_reference(query, *views, at, 0.3), depth_attention_reference(query, keys, values, at, 0.3)
    )
