"""Rows over coded planes in awkward shapes, with poison in everything that no row may read."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from sigma0.kernels.coded_attention import CodedRows, coded_attention_reference
from sigma0.kernels.kv_quantizer import CodedPlanes, KVQuantizer

SEQUENCES, SCALING = 3, 0.3


@dataclass(frozen=True)
class Shape:
    """Planes, heads and places; `page` None is one block for each sequence."""

    codec: KVQuantizer
    kv_heads: int = 2
    shared: int = 2
    width: int = 16
    segment: int = 16
    page: int | None = 24
    room: int = 96
    starts: bool = True
    seen: bool = True


SHAPES = {
    "residual": Shape(KVQuantizer((2, 2, 2, 4), 3, 16), width=32),
    "every width": Shape(KVQuantizer((8, 2, 4), None, 8), kv_heads=1, shared=5),
    "anchor first": Shape(KVQuantizer((8, 4, 2), 0, 16), kv_heads=3, shared=1, width=80, page=40, room=120),
    "anchor of two bits": Shape(KVQuantizer((4, 2), 1, 32), width=128, page=None, starts=False, seen=False),
    "contiguous": Shape(KVQuantizer((4, 4), None, 32), kv_heads=1, width=32, page=None, segment=48),
    "groups of no power of two": Shape(KVQuantizer((1, 8), 1, 24), width=24, page=16, seen=False),
    "one plane": Shape(KVQuantizer((2,), 0, 16), page=32, starts=False),
}


def case(seed, shape, dtype=torch.float32, rows=9, device="cpu"):
    """Query, tails, coded planes and rows: at positions 0, and first and last of a segment, others drawn; one idle."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(high, *size):
        return torch.randint(0, high, size, generator=generator, device=device)

    planes, size = len(shape.codec.bits), shape.page or shape.room
    blocks = SEQUENCES * shape.room // size
    drawn = (generator, device, dtype)
    tails = [_randn((planes, SEQUENCES * shape.segment + 1, shape.kv_heads, shape.width), *drawn) for _ in range(2)]
    coded = []
    for _ in range(2):
        part = CodedPlanes(shape.codec, blocks * size, shape.kv_heads, shape.width, torch.device(device))
        numbers = [_randn((blocks * size, shape.kv_heads, shape.width), *drawn) for _ in range(planes)]
        part.write(torch.arange(blocks * size, device=device), numbers)
        coded.append(part)
    positions = integers(shape.room, rows)
    edges = torch.tensor([0, shape.segment, shape.segment - 1, shape.room - 1, -1], device=device)[:rows]
    positions[: len(edges)] = edges
    sequences = integers(SEQUENCES, rows)
    seen = None
    if shape.seen:
        seen = torch.rand(SEQUENCES, shape.room + 3, generator=generator, device=device) > 0.3
        current = positions >= 0
        seen[sequences[current], positions[current]] = True
    table = torch.randperm(blocks, generator=generator, device=device).view(SEQUENCES, -1)
    at = CodedRows(
        sequences,
        positions,
        integers(planes, rows),
        shape.segment,
        size,
        int(positions.max()) + 1,
        table if shape.page else None,
        integers(shape.room // 2, SEQUENCES) if shape.starts else None,
        seen,
    )
    query = _randn((rows, shape.kv_heads * shape.shared, shape.width), *drawn)
    return query, tails, coded, at


def some(rows, chosen):
    """Only the chosen of rows, bounded as they are."""
    parts = {name: getattr(rows, name)[chosen] for name in ("sequences", "cache_positions", "planes")}
    return replace(rows, **parts, longest=max(1, int(parts["cache_positions"].max()) + 1))


def poison(tails, coded, rows):
    """Makes NaN of every scale, and of every number of a tail, that no row reads."""
    in_tail = torch.zeros(tails[0].shape[:2], dtype=torch.bool, device=tails[0].device)
    decoded = torch.zeros(coded[0].scales.shape[:2], dtype=torch.bool, device=in_tail.device)
    anchor = coded[0].codec.anchor
    for sequence, last, plane in zip(
        rows.sequences.tolist(), rows.cache_positions.tolist(), rows.planes.tolist(), strict=True
    ):
        current = last // rows.segment * rows.segment
        first = 0 if rows.starts is None else min(int(rows.starts[sequence]), last)
        for position in range(max(first, 0), last + 1):
            if rows.seen is not None and not rows.seen[sequence, position]:
                continue
            if position >= current:
                in_tail[plane, sequence * rows.segment + position - current] = True
                continue
            at = int(rows.coded(sequence, torch.tensor(position, device=in_tail.device)))
            decoded[plane, at] = True
            if anchor is not None:
                decoded[anchor, at] = True
    for tail, part in zip(tails, coded, strict=True):
        tail[~in_tail] = torch.nan
        part.scales[~decoded] = torch.nan


def _randn(shape, generator, device, dtype):
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def drawn_shapes(bits, widths):
    """A seed and a shape of these bits and of these widths with their groups."""
    heads = st.sampled_from([(1, 1), (2, 3), (1, 5)])
    places = st.sampled_from([(16, None, 50), (32, 20, 100), (16, 48, 48), (48, 16, 160)])
    several = st.lists(st.sampled_from(bits), min_size=1, max_size=4)

    def made(seed, bits, anchored, widths, heads, places, starts, seen):
        (width, group), (kv_heads, shared), (segment, page, room) = widths, heads, places
        codec = KVQuantizer(tuple(bits), seed % len(bits) if anchored else None, group)
        return seed, Shape(codec, kv_heads, shared, width, segment, page, room, starts, seen)

    flags = [st.booleans() for _ in range(3)]
    widths = st.sampled_from(widths)
    return st.builds(made, st.integers(0, 2**16), several, flags[0], widths, heads, places, *flags[1:])


def assert_agrees(attend, shape, seed, tolerance, dtype=torch.float32, rows=9, device="cpu"):
    """Against decode-then-attend in float64, with NaN in all that no row may read."""
    query, tails, coded, at = case(seed, shape, dtype, rows, device)
    expected = coded_attention_reference(query.double(), [tail.double() for tail in tails], coded, at, SCALING)
    poison(tails, coded, at)
    result = attend(query, tails, coded, at, SCALING)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    assert not result[at.cache_positions < 0].any()


def assert_rows_stand_alone(attend, dtype=torch.float32, device="cpu"):
    """The bits of a row depend on no other row and no bound."""
    query, tails, coded, at = case(5, SHAPES["residual"], dtype, device=device)
    whole = attend(query, tails, coded, at, SCALING)
    for row in range(len(query)):
        result = attend(query[row : row + 1], tails, coded, some(at, slice(row, row + 1)), SCALING)
        assert torch.equal(result, whole[row : row + 1])
    assert torch.equal(attend(query, tails, coded, replace(at, longest=at.longest + 2), SCALING), whole)
