"""Planes in few bits: what lies where, what is decoded, and which segments are encoded."""

import math

import pytest
import torch

from sigma0.config import KVConfig
from sigma0.decode.coded_planes import CodedLayer, Segments, check_stages, plane_codec
from sigma0.decode.lanes import STAGE, Lanes
from sigma0.decode.ops import PlaneCodec
from sigma0.decode.paged_planes import PagedPlanes
from sigma0.decode.plane_store import PlaneStore
from sigma0.decode.planes import BlockShape

HEADS = 2


def test_the_last_plane_anchors_the_others():
    kv = KVConfig(codec="residual", bits=(1, 2, 4), group=8, segment=16)
    assert plane_codec(kv, 3) == PlaneCodec((1, 2, 4), 2, 8)
    assert plane_codec(KVConfig(codec="int4", group=32, segment=32), 3) == PlaneCodec((4, 4, 4), None, 32)
    check_stages(kv, (0, 0))
    check_stages(KVConfig(), (1, 1))
    for stages in ((1, 0), (0, 1)):
        with pytest.raises(ValueError, match="is for models whose K/V are of loops alone"):
            check_stages(kv, stages)


CODEC, SEGMENT = PlaneCodec((8, 8), None, 8), 4


def coded_layer(sequences=2, size=12):
    return CodedLayer(torch.zeros(HEADS, 0, 8), CODEC, sequences, SEGMENT, sequences, size)


def filled_layer():
    """Two sequences of ten positions, of which eight are encoded; and the keys as they were."""
    layer = coded_layer()
    keys = torch.randn(2, HEADS, 10, 8, generator=torch.Generator().manual_seed(0))
    for start in (0, 4, 8):
        part = keys[:, :, start : start + SEGMENT]
        layer.write_span(1, start, part, -part)
        for sequence in range(2 if start < 8 else 0):
            layer.encode(sequence, start, sequence * layer.room + start)
    return layer, keys


def test_segments_are_read_back_decoded_and_the_last_one_as_it_was():
    layer, keys = filled_layer()
    for stop in (1, 4, 5, 8):
        assert [part.shape[2] for part in layer.read_span(1, stop)] == [stop, stop]
    assert layer.read_span(1, 0)[0].shape == (2, HEADS, 0, 8)
    own, values = layer.read_span(1, 10)
    assert torch.equal(own[:, :, 8:], keys[:, :, 8:]) and torch.equal(values[:, :, 8:], -keys[:, :, 8:])
    assert not torch.equal(own[:, :, :8], keys[:, :, :8])
    torch.testing.assert_close(own[:, :, :8], keys[:, :, :8], atol=0.05, rtol=0.05)
    assert not layer.read_span(0, 10)[0].any()


def test_coded_sequences_are_moved_as_they_are():
    layer, _ = filled_layer()
    before = layer.read_span(1, 10)[0]
    layer.grow(14)
    assert layer.room == 16 and torch.equal(layer.read_span(1, 10)[0], before)
    layer.select(torch.tensor([1, 0, 1]))
    assert layer.room == 16 and torch.equal(layer.read_span(1, 10)[0], before[[1, 0, 1]])
    assert layer.blocks == 3
    layer.grow(16)
    assert layer.room == 16


def test_bytes_of_coded_positions():
    layer = coded_layer()
    # of 8 numbers of 8 bits and one scale, in two planes
    assert layer.position_bytes == 2 * 2 * HEADS * 2 * (8 + 2) and layer.room == 12
    computed = 2 * 2 * 2 * HEADS * 8 * 4
    assert layer.bytes_allocated == 12 * layer.position_bytes + SEGMENT * computed
    assert (
        layer.bytes_of(7) == 4 * layer.position_bytes + 3 * computed and layer.bytes_of(8) == 8 * layer.position_bytes
    )


def test_a_span_lies_within_a_segment():
    layer = coded_layer()
    span = torch.ones(2, HEADS, 4, 8)
    layer.write_span(0, 4, span, span)
    for start, count in ((1, 4), (3, 2)):
        with pytest.raises(ValueError, match=f"{count} tokens from cache position {start} on are of several segments"):
            layer.write_span(0, start, span[:, :, :count], span[:, :, :count])
    layer.write_span(0, 2, span[:, :, :2], span[:, :, :2])


def test_segments_are_encoded_once_and_forgotten_as_a_whole():
    segments, told = Segments(4, 2), []
    segments.encode_to(lambda *at: told.append(at), 1, 3)
    assert told == [] and segments.coded.tolist() == [0, 0]
    segments.encode_to(lambda *at: told.append(at), 1, 8)
    assert told == [(1, 0), (1, 4)] and segments.coded.tolist() == [0, 8]
    segments.encode_all(lambda *at: told.append(at), 9)
    assert told[2:] == [(0, 0), (0, 4)] and segments.coded.tolist() == [8, 8]
    segments.shorten(9, 8)
    segments.shorten(12, 9)
    assert segments.coded.tolist() == [8, 8]
    with pytest.raises(ValueError, match="can be cut to 4 tokens, where a segment of 4 begins, and not to 5"):
        segments.shorten(9, 5)
    segments.shorten(9, 4)
    assert segments.coded.tolist() == [4, 4]
    segments.clear(0)
    assert segments.coded.tolist() == [0, 4]
    chosen = segments.select(torch.tensor([1, 0, 1]))
    assert (chosen.segment, chosen.sequences, chosen.coded.tolist()) == (4, 3, [4, 0, 4])


def lanes_of(*tokens, depth=3):
    """Tokens of two sequences by sequence, cache position and stage."""
    lanes = Lanes(2, depth, torch.zeros(0, 1))
    for sequence, position, stage in tokens:
        at = lanes.lane_of(torch.tensor([sequence]), torch.tensor([position]))
        lanes.enter(at, torch.zeros(1, 1), torch.tensor([position]), torch.tensor([position]), stage)
    return lanes


def held(lanes, busy=(), segment=4):
    """Which tokens wait after a look at the lanes, and what was encoded."""
    segments, told = Segments(segment, 2), []
    segments.hold(lanes, lambda *at: told.append(at), busy)
    stage = lanes.table[:-1, STAGE].view(2, -1)
    return [row.tolist() for row in (stage == lanes.held).nonzero()], told


def test_a_token_that_begins_a_segment_is_held_until_those_before_it_have_run():
    # position 4 of sequence 0 is behind 3, which fills its planes; 8 of sequence 1 is alone
    lanes = lanes_of((0, 3, 5), (0, 4, 0), (1, 8, 0))
    assert held(lanes) == ([[0, 1]], [(1, 0), (1, 4)])
    # the one before has left
    lanes.table[0, STAGE] = lanes.idle
    assert held(lanes) == ([], [(0, 0), (1, 0), (1, 4)]) and lanes.table[1, STAGE] == 0


@pytest.mark.parametrize(
    "tokens, waits",
    [
        (((0, 4, 0),), []),
        (((0, 5, 0), (0, 4, 1)), []),
        (((0, 4, 0), (0, 5, 1)), []),
        (((0, 4, 1), (0, 3, 4)), []),
        (((0, 5, 0), (0, 4, 2)), []),
        (((0, 4, 0), (1, 3, 1)), []),
        (((0, 4, 0), (0, 3, 0)), [[0, 1]]),
        (((0, 4, 0), (0, 2, 5)), [[0, 1]]),
        (((1, 4, 0), (1, 3, 1)), [[1, 1]]),
    ],
)
def test_tokens_in_a_segment_or_behind_a_whole_one_are_not_held(tokens, waits):
    assert held(lanes_of(*tokens))[0] == waits


def test_a_busy_sequence_is_waited_for():
    lanes = lanes_of((0, 4, 0), (1, 4, 0))
    assert held(lanes, busy={1}) == ([[1, 1]], [(0, 0)])
    assert held(lanes) == ([], [(0, 0), (1, 0)])


SHAPE = BlockShape(layers=2, planes=2, kv_heads=HEADS, head_dim=8, size=8)
KV = KVConfig(codec="int4", group=8, segment=16)


def paged():
    planes = PagedPlanes(SHAPE, 8, torch.float32, torch.device("cpu"), 2, 32, KV)
    planes.place(0, [0, 1, 2])
    planes.place(1, [7, 3, 5, 4])
    generator = torch.Generator().manual_seed(1)
    for layer in planes.planes:
        layer.flat_keys.copy_(torch.randn(layer.flat_keys.shape, generator=generator))
        layer.flat_values.copy_(torch.randn(layer.flat_values.shape, generator=generator))
    return planes


def test_blocks_of_coded_positions_lie_where_the_table_says():
    planes = paged()
    place = planes.placement(3)
    assert (place.size, place.total, place.coded.size, place.room) == (16, 33, 8, 32)
    assert place.coded.blocks is planes.table and place.blocks is place.first is None
    planes.encode_to(1, 31)
    assert planes.segments.coded.tolist() == [0, 16] and planes.pop_errors() == {}
    there = torch.tensor([*range(56, 64), *range(24, 32)])
    for layer in planes.planes:
        read = layer.coded[0].read(1, there)
        torch.testing.assert_close(read, layer.flat_keys[1, 16:32], atol=0.5, rtol=0.2)
        assert not layer.coded[0].read(1, torch.tensor([*range(24), *range(32, 56)])).any()
    before = [layer.flat_keys.clone() for layer in planes.planes]
    planes.wipe([0, 7])
    assert all(torch.equal(layer.flat_keys, old) for layer, old in zip(planes.planes, before, strict=True))


@pytest.mark.parametrize("last", [0, 1])
def test_a_plane_that_no_token_writes_holds_what_the_last_one_holds(last):
    planes = paged()
    own = [layer.flat_keys[last, 16:32].clone() for layer in planes.planes]
    other = [layer.flat_keys[:, :16].clone() for layer in planes.planes]
    planes.begin(1, 0, last)
    assert planes.last_planes == [1, last]
    planes.encode_to(1, 16)
    for layer, keys, rest in zip(planes.planes, own, other, strict=True):
        assert torch.equal(layer.flat_keys[1, 16:32], keys) and torch.equal(layer.flat_keys[:, :16], rest)


def test_a_sequence_goes_on_from_what_it_finds_encoded():
    planes = paged()
    planes.begin(1, 16, 1)
    assert planes.segments.coded.tolist() == [0, 16]
    planes.release(1)
    assert planes.segments.coded.tolist() == [0, 0] and (planes.first[1], planes.rooms[1]) == (0, 0)


def test_numbers_that_are_none_end_their_sequence_alone():
    planes = paged()
    planes.planes[1].flat_keys[0, 17, 0, 0] = math.nan
    planes.encode_to(1, 16)
    planes.encode_to(0, 16)
    errors = planes.pop_errors()
    assert list(errors) == [1] and isinstance(errors[1], ValueError) and planes.pop_errors() == {}
    assert planes.segments.coded.tolist() == [16, 16]


def test_tokens_of_an_engine_are_held_too():
    planes, lanes = paged(), lanes_of((0, 16, 0), (1, 16, 0), (1, 15, 1))
    planes.hold(lanes, ())
    assert planes.segments.coded.tolist() == [16, 0] and lanes.table[3 + 1, STAGE] == lanes.held
    plain = PagedPlanes(SHAPE, 8, torch.float32, torch.device("cpu"), 2)
    plain.hold(lanes, ())
    assert lanes.table[3 + 1, STAGE] == lanes.held


def test_a_store_of_coded_planes():
    store, like = PlaneStore(2, 2, 24, kv=KV), torch.zeros(3, HEADS, 0, 8)
    store.encode(16)
    store.hold(lanes_of((0, 16, 0)))
    assert store.segments is None
    layers = [store.reserve_layer(layer, like, 5) for layer in range(2)]
    assert isinstance(layers[0], CodedLayer) and (layers[0].room, layers[0].blocks) == (24, 3)
    segments = store.segments
    assert (segments.segment, segments.sequences) == (16, 3)
    for layer in layers:
        layer.flat_keys.fill_(1.0)
    store.encode(17)
    assert store.segments is segments and segments.coded.tolist() == [16, 16, 16]
    for layer in layers:
        for sequence in range(3):
            at = torch.arange(24) + 24 * sequence
            read = layer.coded[0].read(0, at)
            torch.testing.assert_close(read[:16], torch.ones(16, HEADS, 8), atol=0.02, rtol=0)
            assert not read[16:].any()
    segments.coded[:] = 0
    store.hold(lanes_of((0, 16, 0)))
    assert segments.coded.tolist() == [16, 0, 0]
    store.clear()
    assert store.segments is None
