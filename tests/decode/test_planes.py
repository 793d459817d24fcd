"""Planes of K/V: where numbers lie, and how many bytes they take."""

from types import SimpleNamespace

import pytest
import torch

from sigma0.config import KVConfig
from sigma0.decode.kv_cache import DepthCache, Plane
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.ops import KVQuantizer
from sigma0.decode.planes import LayerPlanes, extra_planes, kv_quantizers

HEADS, WIDTH = 2, 3
LIKE = torch.zeros(HEADS, 0, WIDTH)
SHAPE = BlockShape(layers=3, planes=4, kv_heads=HEADS, head_dim=WIDTH, size=5, stages=(2, 1))


def numbered(shape, start=1):
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def test_a_block_takes_the_numbers_of_all_its_planes():
    assert BlockShape(3, 4, 2, 3, 5).stages == DepthCache(3, 4, 0).stages == (0, 0)
    assert extra_planes((2, 1)) == [1, 1, 2] and extra_planes((0, 0)) == []
    assert SHAPE.counts == [4, 4, 4, 1, 1, 2]
    numbers = 2 * 16 * HEADS * WIDTH * 5
    assert SHAPE.bytes_with(torch.float32) == 4 * numbers and SHAPE.bytes_with(torch.bfloat16) == 2 * numbers
    codec = KVQuantizer((2, 2, 2, 4), 3, 8)
    coded = BlockShape(3, 4, HEADS, 16, 5)
    # for each head 16 numbers of 10 bits in all, and 2 scales of 2 bytes for each plane
    assert coded.bytes_with(torch.float32, [codec] * 3) == 2 * 3 * HEADS * (16 * 10 // 8 + 4 * 2 * 2) * 5


def test_blocks_that_some_bytes_hold():
    block = SHAPE.bytes_with(torch.float32)
    assert [SHAPE.count_in(held, torch.float32) for held in (block, 2 * block - 1, 2 * block)] == [1, 1, 2]
    with pytest.raises(ValueError, match=f"{block - 1} bytes of K/V hold no block: one takes {block} bytes$"):
        SHAPE.count_in(block - 1, torch.float32)
    codecs, shape = [KVQuantizer((2, 2, 2, 4), 3, 8)] * 3, BlockShape(3, 4, HEADS, 16, 5)
    coded, tail = shape.bytes_with(torch.float32, codecs), shape.bytes_with(torch.float32) * 10 // 5
    counted = [shape.count_in(tail + held, torch.float32, codecs, 10) for held in (coded, 3 * coded - 1, 3 * coded)]
    assert counted == [1, 2, 3]
    with pytest.raises(ValueError, match=f"the segments under way take {tail} bytes"):
        shape.count_in(tail + coded - 1, torch.float32, codecs, 10)


def test_a_shape_is_read_from_a_model():
    config = SimpleNamespace(hidden_size=12, num_attention_heads=4, num_key_value_heads=2)
    model = SimpleNamespace(config=config, num_block_layers=3, num_loops=5, stages=(1, 2))
    assert BlockShape.of(model, 8) == BlockShape(3, 5, 2, 3, 8, (1, 2))
    config.head_dim = 7
    assert BlockShape.of(model, 8).head_dim == 7
    config.head_dim = None
    assert BlockShape.of(model, 8).head_dim == 3


@pytest.mark.parametrize("blocks", [[], [0], [2], [0, 1, 2], [3, 1], [1, 3], [0, 2, 3], [1, 2, 0], [3, 0, 1]])
def test_blocks_are_wiped_and_no_others(blocks):
    layer = LayerPlanes(LIKE, 2, 4, 3)
    layer.flat_keys.fill_(1.0)
    layer.flat_values.fill_(1.0)
    layer.wipe(blocks)
    for flat in (layer.flat_keys, layer.flat_values):
        gone = {position // 3 for position in range(12) if not flat[:, position].any()}
        assert gone == set(blocks) and flat[:, 12].all()
        assert all(flat[:, position].all() for position in range(12) if position // 3 not in blocks)


def test_blocks_of_an_engine():
    planes = PagedPlanes(SHAPE, 6, torch.float32, torch.device("cpu"), sequences=2, longest=11)
    assert [len(layer.flat_keys) for layer in planes.planes] == SHAPE.counts
    assert planes.table.shape == (2, 3) and (planes.first, planes.rooms) == ([0, 0], [0, 0])
    assert planes.last_planes == [3, 3] and planes.segments is None and planes.pop_errors() == {}
    assert PagedPlanes(SHAPE, 6, torch.float32, torch.device("cpu"), longest=10).table.shape == (1, 2)
    assert PagedPlanes(SHAPE, 6, torch.float32, torch.device("cpu")).table.shape == (1, 6)
    planes.place(0, [2, 3])
    planes.place(1, [5, 1, 4])
    assert (planes.first, planes.rooms) == ([10, -1], [10, 15])
    assert planes.table.tolist() == [[2, 3, 0], [5, 1, 4]]
    place = planes.placement(3)
    assert (place.size, place.total, place.room) == (5, 31, 15) and place.coded is None
    assert place.flat(torch.tensor([0, 1]), torch.tensor([6, 5])).tolist() == [16, 5]
    planes.release(1)
    assert (planes.first, planes.rooms) == ([10, 0], [10, 0])
    planes.place(1, [4, 3])
    assert planes.first == [10, -1]
    planes.begin(0, 0, 2)
    assert planes.last_planes == [2, 3]


def test_exits_of_an_engine_s_tokens_reach_the_layers_that_loop():
    planes = PagedPlanes(SHAPE, 2, torch.float32, torch.device("cpu"))
    planes.place(0, [1])
    for layer in planes.planes:
        layer.flat_keys.copy_(numbered(layer.flat_keys.shape))
    before = [layer.flat_keys.clone() for layer in planes.planes]
    planes.leave(torch.tensor([0]), torch.tensor([2]), torch.tensor([1]))
    for place, (layer, old) in enumerate(zip(planes.planes, before, strict=True)):
        expected = old.clone()
        if place < 3:
            expected[1:, 5 + 2] = old[1, 5 + 2]
        assert torch.equal(layer.flat_keys, expected)
    planes.wipe([0])
    assert all(not layer.flat_keys[:, :5].any() and layer.flat_keys[:, 5:].all() for layer in planes.planes)


def test_the_last_plane_is_the_anchor_of_residuals_alone():
    expected = [KVQuantizer((8,) * 4, None, 8), KVQuantizer((4,) * 4, None, 8), KVQuantizer((2, 2, 2, 4), 3, 8)]
    for codec, looping in zip(("int8", "int4", "residual"), expected, strict=True):
        kv, bits = KVConfig(codec=codec, group=8), looping.bits[-1]
        others = [KVQuantizer((bits,) * count, None, 8) for count in (1, 1, 2)]
        assert kv_quantizers(kv, 3, 4, (2, 1)) == [looping] * 3 + others
        # of 16 planes 12 loop, and 16 bits of a scale are for 8 numbers
        assert SHAPE.number_bits(kv) == (3 * sum(looping.bits) + 4 * bits) / 16 + 2


def test_planes_that_no_loop_wrote_are_encoded_as_the_last_that_one_wrote():
    shape, kv = BlockShape(1, 3, HEADS, 16, 4), KVConfig(codec="int8", segment=16, group=16)
    planes = PagedPlanes(shape, 12, torch.float32, torch.device("cpu"), sequences=2, longest=16, kv=kv)
    for sequence in range(2):
        planes.place(sequence, range(4 * sequence + 1, 4 * sequence + 5))
        planes.begin(sequence, 0, 1)
    (layer,) = planes.planes
    layer.flat_keys.normal_(generator=torch.Generator().manual_seed(0))
    written = layer.flat_keys[1, 16:32].clone()
    planes.encode_to(1, 16)
    for plane in (1, 2):
        read = layer.coded[0].read(plane, torch.arange(20, 36)).float().view_as(written)
        torch.testing.assert_close(read, written, rtol=0, atol=0.02)
    assert planes.segments.coded.tolist() == [0, 16]


def test_a_store_grows_as_it_is_told_and_else_doubles():
    like = torch.zeros(2, HEADS, 0, WIDTH)
    store = DepthCache(1, 4, 9, (1, 1))
    assert len(store.layers) == 7 and (store.length, store.depth) == (0, None)
    assert store.reserve_layer(0, like, 3).room == 9 and store.reserve_layer(0, like, 9).room == 9
    assert store.reserve_layer(0, like, 10).room == 18 and store.reserve_layer(0, like, 50).room == 50
    assert [len(store.reserve_layer(layer, like, 3).flat_keys) for layer in range(3)] == [4, 1, 2]
    assert store.reserve_layer(1, like, 12).room == 18
    store.reset()
    store.depth, store.capacity = 2, 0
    planes = store.reserve_layer(0, like, 3)
    assert planes.room == 3 and len(planes.flat_keys) == 2 and planes.blocks == 2
    store.capacity = 8
    assert store.reserve_layer(0, like, 4).room == 8
    store.length = 3
    store.reset()
    assert (store.length, store.depth, store.by_layer) == (0, None, [None] * 3)


def test_a_plane_is_a_layer_of_transformers():
    store = DepthCache(1, 2, 0)
    first, second = Plane(store, 0, 0), Plane(store, 0, 1)
    assert not first.is_initialized and first.keys is first.values is None
    keys, values = numbered((2, HEADS, 4, WIDTH)), numbered((2, HEADS, 4, WIDTH), 100)
    seen = second.update(keys, values)
    assert torch.equal(seen[0], keys) and torch.equal(seen[1], values) and second.is_initialized
    assert second.get_seq_length() == 0 and second.keys.shape == (2, HEADS, 0, WIDTH)
    store.length = 4
    assert torch.equal(second.keys, keys) and torch.equal(second.values, values) and not first.keys.any()
    assert second.get_seq_length() == 4 and second.get_mask_sizes(3) == (7, 0) and second.get_max_length() == -1
    assert (second.is_sliding, second.is_croppable, second.is_compileable) == (False, True, False)
    for needs in ("keys", "values"):
        new = {name: torch.ones(2, HEADS, 1, WIDTH, requires_grad=name == needs) for name in ("keys", "values")}
        seen = second.update(new["keys"], new["values"])
        assert torch.equal(seen[0][:, :, :4], keys) and torch.equal(seen[1][:, :, :4], values)
        (seen[0].sum() + seen[1].sum()).backward()
        assert torch.equal(new[needs].grad, torch.ones(2, HEADS, 1, WIDTH))
    empty = DepthCache(1, 2, 0)
    Plane(empty, 0, 0).lazy_initialization(keys, values)
    assert empty.planes[0].room == 4
