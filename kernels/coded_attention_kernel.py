# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Attention over coded planes in Triton: `coded_attention.py`, which decodes while it reads.

Formula and reference are those of `coded_attention.py`. Keys are split along the context and joined as in
`depth_attention.py`, earlier segments before the row's own. What is decoded is decoded once for all query heads that
share it, in float32, rounded to the model's dtype as K/V are, and never written. Parts are joined by a second launch:
the last that ends would have no registers for it.

A plane's codes of a head lie side by side and are loaded as whole bytes, which a reshape spreads to numbers. How many
bits they have depends on the row's plane: there is a loop for each width of the codec, and all but one are empty.

Bytes for each row, K/V head and position of an earlier segment: 2 d (b_t + b_a) / 8 + 4 SCALE_BYTES d / g where plane t
is a residual to anchor a, half of it where not; of the row's own segment 2 d bytes of the model's dtype: the minimum. A
block table adds 8 bytes for a block, `seen` 1 for a position, and parts 4 (d + 2) for a head, written and read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sigma0.kernels import depth_attention
from sigma0.kernels.coded_attention import CodedRows
from sigma0.kernels.depth_attention import MAXIMUM, SMALLEST_TILE, SUMS, TOTAL
from sigma0.kernels.kv_quantizer import WIDTHS, CodedPlanes
from sigma0.kernels.row_product import REGISTERS
from sigma0.presence import wants_triton

JOIN_WARPS = 4
# Of a part: a code is read in few bytes.
PART_TILES = 4


def coded_attention(
    query: Tensor, tails: Sequence[Tensor], coded: Sequence[CodedPlanes], rows: CodedRows, scaling: float
) -> Tensor:
    """`coded_attention_reference` in two launches of Triton kernels: parts of the keys, which are then joined.

    Where the keys of a row are split depends on its own position and start alone, and parts are joined in one order, so
    that the bits of a row do not depend on the rows beside it, nor on the bound on their positions.

    Args:
        query: `[R, H, d]`, d side by side; float32, float16 or bfloat16.
        tails: Keys and values, each `[planes, S * G + 1, H_kv, d]`, contiguous and of the query's dtype.
        coded: Keys and values.
        rows: The rows; each sees its own position.
        scaling: Factor on the scores.

    Returns:
        `[R, H, d]`, 0 for rows that are nobody's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    _check(query, tails, coded, rows)
    count, heads, width = query.shape
    keys, values = coded
    codec, anchor = keys.codec, keys.codec.anchor
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not count:
        return output
    # bound to names, since the kernel sees their memory only
    columns = [column.contiguous() for column in (rows.sequences, rows.cache_positions, rows.planes)]
    starts = columns[0] if rows.starts is None else rows.starts.contiguous()
    tile = tile_for(width, query.dtype)
    splits = depth_attention.splits_for(rows.longest, tile, PART_TILES)
    parts = torch.empty((count, heads, splits, width), dtype=torch.float32, device=query.device)
    sums = torch.empty((count, heads, splits, SUMS), dtype=torch.float32, device=query.device)
    _coded_part_kernel[(count, keys.heads, splits)](
        query,
        tails[0],
        keys.codes,
        keys.scales,
        tails[1],
        values.codes,
        values.scales,
        keys.layout,
        *columns,
        starts,
        columns[0] if rows.seen is None else rows.seen,
        columns[0] if rows.blocks is None else rows.blocks,
        parts,
        sums,
        scaling,
        heads,
        heads // keys.heads,
        keys.heads,
        len(codec.bits),
        keys.positions,
        rows.segment,
        rows.size,
        tails[0].shape[1],
        splits,
        query.stride(0),
        query.stride(1),
        0 if rows.seen is None else rows.seen.stride(0),
        0 if rows.blocks is None else rows.blocks.stride(0),
        STARTS=rows.starts is not None,
        SEEN=rows.seen is not None,
        PAGED=rows.blocks is not None,
        ANCHOR=-1 if anchor is None else anchor,
        ANCHOR_BITS=0 if anchor is None else codec.bits[anchor],
        # each a power of 2, which is a bit
        CODES=sum(set(codec.bits)),
        SCALED=codec.group,
        HEAD=width,
        GROUP=max(SMALLEST_TILE, triton.next_power_of_2(heads // keys.heads)),
        TILE=tile,
        WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(width)),
        PART_TILES=PART_TILES,
        MOST_PARTS=depth_attention.MOST_PARTS,
        # Triton's interpreter multiplies bfloat16 matrices wrongly
        UPCAST=query.dtype == torch.bfloat16 and not isinstance(_coded_part_kernel, triton.JITFunction),
        num_warps=warps_for(query.dtype),
        **options_for(query.dtype),
    )
    _join_parts(parts, sums, output)
    return output


def _join_parts(parts: Tensor, sums: Tensor, output: Tensor) -> None:
    """Launches the kernel that joins parts of the keys.

    Args:
        parts: Weighted values of each part, float32 `[R, H, parts, d]`.
        sums: Maximum and sum of each, float32 `[R, H, parts, SUMS]`.
        output: `[R, H, d]`, written.
    """
    count, heads, splits, width = parts.shape
    _join_kernel[(count, heads)](
        parts,
        sums,
        output,
        heads,
        width,
        splits,
        SPLITS=depth_attention.MOST_PARTS,
        WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(width)),
        num_warps=JOIN_WARPS,
    )


def tile_for(width: int, dtype: torch.dtype) -> int:
    """Positions of one step: fewer than of plain planes in half precision, whose codes take registers too."""
    tile = depth_attention.tile_for(width, dtype)
    return max(depth_attention.SMALLEST_TILE, tile // 4) if dtype.itemsize == 2 else tile


def warps_for(dtype: torch.dtype) -> int:
    """Warps of a part: in float32 a thread has no registers for more of it."""
    return 8 if dtype == torch.float32 else 4


def options_for(dtype: torch.dtype) -> dict[str, int]:
    """Depth of the pipeline, of which a deeper one spills, and registers."""
    return {"num_stages": 1 if dtype == torch.float32 else 2} | REGISTERS


def _check(query: Tensor, tails: Sequence[Tensor], coded: Sequence[CodedPlanes], rows: CodedRows) -> None:
    heads, width = query.shape[1:]
    keys, values = coded
    shapes = {(part.positions, part.heads, part.width) for part in coded}
    if shapes != {(keys.positions, keys.heads, width)} or heads % keys.heads or keys.codec != values.codec:
        raise ValueError(f"query {tuple(query.shape)}, and coded keys and values of {sorted(shapes)}")
    shape = (len(keys.codec.bits), tails[0].shape[1], keys.heads, width)
    if any(tuple(tail.shape) != shape or not tail.is_contiguous() for tail in tails):
        raise ValueError(f"tails {[tuple(tail.shape) for tail in tails]} must be contiguous, and of {shape}")
    if {tail.dtype for tail in tails} != {query.dtype}:
        raise ValueError(f"query {query.dtype} and tails {[tail.dtype for tail in tails]} must share one dtype")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the kernel takes float32, float16 and bfloat16, not {query.dtype}")
    if query.stride(2) != 1:
        raise ValueError("the numbers of a head must lie side by side")
    for name in ("seen", "blocks"):
        table = getattr(rows, name)
        if table is not None and table.stride(1) != 1:
            raise ValueError(f"the cache positions of {name} must lie side by side")
    if rows.seen is not None and rows.seen.shape[1] < rows.longest:
        raise ValueError(f"seen knows {rows.seen.shape[1]} cache positions, and {rows.longest} are read")


if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.depth_attention import attend_tile

    # A kernel reads no global but a constexpr.
    _MAXIMUM, _TOTAL, _SUMS = tl.constexpr(MAXIMUM), tl.constexpr(TOTAL), tl.constexpr(SUMS)
    _WIDTHS, _NARROWEST = tl.constexpr(len(WIDTHS)), tl.constexpr(WIDTHS[0])

    @triton.jit
    def _stored(
        codes_ptr,
        scales_ptr,
        heads_at,
        inside,
        BITS: tl.constexpr,
        SCALED: tl.constexpr,
        HEAD: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """Decoded numbers of heads of a plane, float32 `[TILE, WIDTH]`; 0 where nothing is inside."""
        SIZE: tl.constexpr = HEAD * BITS // 8
        # numbers that are sure to share a scale: all of a group where that is a power of 2
        UNIT: tl.constexpr = SCALED & -SCALED
        byte = tl.arange(0, WIDTH * BITS // 8)
        unit = tl.arange(0, WIDTH // UNIT)
        codes = tl.load(
            codes_ptr + (heads_at * SIZE)[:, None] + byte[None, :],
            mask=inside[:, None] & (byte < SIZE)[None, :],
            other=0,
        )
        scales = tl.load(
            scales_ptr + (heads_at * (HEAD // SCALED))[:, None] + (unit * UNIT // SCALED)[None, :],
            mask=inside[:, None] & (unit < HEAD // UNIT)[None, :],
            other=0.0,
        )
        shifts = tl.arange(0, 8 // BITS) * BITS
        parts = (codes.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
        levels = parts.to(tl.float32) - (2 ** (BITS - 1) - 0.5)
        grouped = tl.reshape(levels, [heads_at.shape[0], WIDTH // UNIT, UNIT])
        return tl.reshape(grouped * scales.to(tl.float32)[:, :, None], [heads_at.shape[0], WIDTH])

    @triton.jit
    def _decoded(
        codes_ptr,
        scales_ptr,
        offset,
        scales_at,
        anchor_offset,
        anchor_scales_at,
        heads_at,
        inside,
        adds,
        BITS: tl.constexpr,
        ANCHOR_BITS: tl.constexpr,
        SCALED: tl.constexpr,
        HEAD: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """As `_stored`, with the anchor's numbers where the plane `adds` them."""
        numbers = _stored(codes_ptr + offset, scales_ptr + scales_at, heads_at, inside, BITS, SCALED, HEAD, WIDTH)
        if ANCHOR_BITS:
            # the anchor itself reads nothing here, and adds 0
            numbers += _stored(
                codes_ptr + anchor_offset,
                scales_ptr + anchor_scales_at,
                heads_at,
                inside & (heads_at * 0 + adds > 0),
                ANCHOR_BITS,
                SCALED,
                HEAD,
                WIDTH,
            )
        return numbers

    @triton.jit
    def _coded_part_kernel(
        query_ptr,
        key_tail_ptr,
        key_codes_ptr,
        key_scales_ptr,
        value_tail_ptr,
        value_codes_ptr,
        value_scales_ptr,
        layout_ptr,
        sequences_ptr,
        row_positions_ptr,
        row_planes_ptr,
        starts_ptr,
        seen_ptr,
        blocks_ptr,
        parts_ptr,
        sums_ptr,
        scaling,
        heads,
        shared,
        kv_heads,
        planes,
        positions,
        segment,
        block_size,
        tail_positions,
        splits,
        query_row_stride,
        query_head_stride,
        seen_row_stride,
        blocks_row_stride,
        STARTS: tl.constexpr,
        SEEN: tl.constexpr,
        PAGED: tl.constexpr,
        ANCHOR: tl.constexpr,
        ANCHOR_BITS: tl.constexpr,
        CODES: tl.constexpr,
        SCALED: tl.constexpr,
        HEAD: tl.constexpr,
        GROUP: tl.constexpr,
        TILE: tl.constexpr,
        WIDTH: tl.constexpr,
        PART_TILES: tl.constexpr,
        MOST_PARTS: tl.constexpr,
        UPCAST: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)
        sequence = tl.load(sequences_ptr + row)
        last = tl.load(row_positions_ptr + row).to(tl.int32)
        plane = tl.load(row_planes_ptr + row)
        somebody = last >= 0
        first = last * 0
        if STARTS:
            start = tl.load(starts_ptr + sequence, mask=somebody, other=0).to(tl.int32)
            first = tl.maximum(tl.minimum(start, last), 0)
        # every part takes whole tiles, so that they are aligned however long the context is
        tiles = (last + 1 - first + TILE - 1) // TILE
        tiles_each = (tiles + MOST_PARTS * PART_TILES - 1) // (MOST_PARTS * PART_TILES) * PART_TILES
        begin = first + split * tiles_each * TILE
        end = tl.minimum(begin + tiles_each * TILE, last + 1)
        # of the row's own segment
        current = tl.maximum(last, 0) // segment * segment
        coded_end = tl.minimum(end, current)

        numbers = tl.arange(0, WIDTH)
        members = tl.arange(0, GROUP)
        head = kv_head * shared + members
        wanted = (members < shared)[:, None] & (numbers < HEAD)[None, :]
        q = tl.load(
            query_ptr + row * query_row_stride + head[:, None] * query_head_stride + numbers[None, :],
            mask=wanted,
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        # what nobody reads joins to 0 / 1
        highest = tl.full([GROUP], 0.0, tl.float32) + tl.where(somebody, -float("inf"), 0.0)
        total = tl.full([GROUP], 0.0, tl.float32) + tl.where(somebody, 0.0, 1.0)
        summed = tl.zeros([GROUP, WIDTH], tl.float32)

        bits = tl.load(layout_ptr + plane, mask=somebody, other=0)
        # planes begin at a multiple of what a head has in the fewest bits
        offset = tl.multiple_of(
            tl.load(layout_ptr + planes + plane, mask=somebody, other=0), (HEAD // 8) & -(HEAD // 8)
        )
        scales_at = plane * positions * kv_heads * (HEAD // SCALED)
        anchor = tl.full([], ANCHOR if ANCHOR_BITS else 0, tl.int64)
        anchor_offset = tl.multiple_of(tl.load(layout_ptr + planes + anchor), (HEAD // 8) & -(HEAD // 8))
        anchor_scales_at = anchor * positions * kv_heads * (HEAD // SCALED)
        adds = tl.where(plane != anchor, 1, 0)
        for narrower in tl.static_range(_WIDTHS):
            if (_NARROWEST << narrower) & CODES:
                # empty for all widths but the plane's own
                stop = tl.where(bits == (_NARROWEST << narrower), coded_end, begin)
                for start in range(begin, stop, TILE):
                    cache_positions = start + tl.arange(0, TILE)
                    inside = cache_positions < stop
                    block = sequence
                    offset_in_block = cache_positions
                    if PAGED:
                        block = tl.load(
                            blocks_ptr + sequence * blocks_row_stride + cache_positions // block_size,
                            mask=inside,
                            other=0,
                        )
                        offset_in_block = cache_positions % block_size
                    if SEEN:
                        inside = inside & (
                            tl.load(seen_ptr + sequence * seen_row_stride + cache_positions, mask=inside, other=0) != 0
                        )
                    heads_at = (block * block_size + offset_in_block) * kv_heads + kv_head
                    k = _decoded(
                        key_codes_ptr,
                        key_scales_ptr,
                        offset,
                        scales_at,
                        anchor_offset,
                        anchor_scales_at,
                        heads_at,
                        inside,
                        adds,
                        _NARROWEST << narrower,
                        ANCHOR_BITS,
                        SCALED,
                        HEAD,
                        WIDTH,
                    )
                    v = _decoded(
                        value_codes_ptr,
                        value_scales_ptr,
                        offset,
                        scales_at,
                        anchor_offset,
                        anchor_scales_at,
                        heads_at,
                        inside,
                        adds,
                        _NARROWEST << narrower,
                        ANCHOR_BITS,
                        SCALED,
                        HEAD,
                        WIDTH,
                    )
                    k = k.to(query_ptr.dtype.element_ty).to(q.dtype)
                    v = v.to(query_ptr.dtype.element_ty).to(q.dtype)
                    highest, total, summed = attend_tile(q, k, v, inside, scaling, highest, total, summed)
        for start in range(tl.maximum(begin, current), end, TILE):
            cache_positions = start + tl.arange(0, TILE)
            inside = cache_positions < end
            if SEEN:
                inside = inside & (
                    tl.load(seen_ptr + sequence * seen_row_stride + cache_positions, mask=inside, other=0) != 0
                )
            where = inside[:, None] & (numbers < HEAD)[None, :]
            in_tail = plane * tail_positions + sequence * segment + (cache_positions - current)
            at = ((in_tail * kv_heads + kv_head) * HEAD)[:, None] + numbers[None, :]
            k = tl.load(key_tail_ptr + at, mask=where, other=0.0).to(q.dtype)
            v = tl.load(value_tail_ptr + at, mask=where, other=0.0).to(q.dtype)
            highest, total, summed = attend_tile(q, k, v, inside, scaling, highest, total, summed)
        split_at = (row * heads + head) * splits + split
        tl.store(sums_ptr + split_at * _SUMS + _MAXIMUM, highest, mask=members < shared)
        tl.store(sums_ptr + split_at * _SUMS + _TOTAL, total, mask=members < shared)
        tl.store(parts_ptr + split_at[:, None] * HEAD + numbers[None, :], summed, mask=wanted)

    @triton.jit
    def _join_kernel(parts_ptr, sums_ptr, output_ptr, heads, width, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
        row_head = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
        split = tl.arange(0, SPLITS)
        numbers = tl.arange(0, WIDTH)
        there = split < splits
        highest = tl.load(sums_ptr + (row_head * splits + split) * _SUMS + _MAXIMUM, mask=there, other=-float("inf"))
        total = tl.load(sums_ptr + (row_head * splits + split) * _SUMS + _TOTAL, mask=there, other=0.0)
        # a part without a cache position has the maximum -inf and weighs nothing
        weight = tl.exp(highest - tl.max(highest))
        where = there[:, None] & (numbers < width)[None, :]
        part = tl.load(
            parts_ptr + (row_head * splits + split)[:, None] * width + numbers[None, :], mask=where, other=0.0
        )
        joined = tl.sum(part * weight[:, None], axis=0) / tl.sum(total * weight)
        tl.store(output_ptr + row_head * width + numbers, joined, mask=numbers < width)
