# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Decode attention in which every row reads the K/V plane of its own loop.

For a row (sequence b, cache position c, loop t), with the keys and values of position j taken from plane s_j:

    o = softmax over start_b <= j <= c, j no pad, of (q k_{s_j, j} * scaling) v_{s_j, j}
    s_j = t                    `finish` and `verify`: each plane holds just what a run of all loops would have written
    s_j = min(t, e_j)          `drop` on a CPU: the plane of the loop at which position j exited; elsewhere that one is
                               copied to the deeper ones when j exits, and s_j = t

Query heads that share a K/V head are read together. The softmax is taken online in float32. Contexts are split along
the keys, and the part that ends last joins them all, in one order: with m, l and a the maximum, sum and weighted values
of each,

    o = sum_i exp(m_i - M) a_i / sum_i exp(m_i - M) l_i,  M = max_i m_i

K/V are paged: `[planes, blocks, H_kv, block_size, d]`, the block of a position given by a block table `[B, blocks of a
sequence]`. A contiguous cache is the case of one block for each sequence. Any strides will do as long as the d numbers
of a head lie side by side: a cache that keeps `[planes, positions, H_kv, d]` gives a view. Where each row reads one
stretch of one plane, a CPU takes `span_attention.py`.

Bytes for each row and K/V head: 2 (c - start + 1) d b, the minimum; q, o and the parts are small beside it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.kernels.row_product import REGISTERS, launch_options
from sigma0.presence import wants_triton

SMALLEST_TILE = 16
PART_WARPS = 4
# Tiles of a part, as long as there are no more parts than so many; then a multiple of it.
PART_TILES, MOST_PARTS = 1, 64
# The maximum and the sum of a part, side by side.
MAXIMUM, TOTAL, SUMS = range(3)


@dataclass(frozen=True)
class DepthRows:
    """The rows of one pass."""

    sequences: Tensor  # b, int64 `[R]`
    cache_positions: Tensor  # c, int64 `[R]`
    planes: Tensor  # t counted from 0, int64 `[R]`
    # First cache position of each sequence that is no pad, int64 `[B]`; None where there are no pads
    starts: Tensor | None
    # Which cache positions are no pads, bool `[B, >= longest]`, if pads lie after a start too; else None
    seen: Tensor | None
    # Block numbers of each sequence in order, int32 `[B, n]`; None where block b is sequence b
    block_tables: Tensor | None
    longest: int  # One more than the largest cache position
    # Zeros, int32 `[R * H_kv]`, which are zeros again after a launch; None for others in every launch
    arrived: Tensor | None = None


def depth_attention_reference(query: Tensor, keys: Tensor, values: Tensor, rows: DepthRows, scaling: float) -> Tensor:
    """The formula above in plain torch, every row masked over all cache positions; what the fast paths must equal.

    Args:
        query: `[R, H, d]`.
        keys: `[planes, blocks, H_kv, block_size, d]`.
        values: As `keys`.
        rows: Sequence, position and plane of each row.
        scaling: Factor on the scores.

    Returns:
        `[R, H, d]`, 0 for rows that see nothing, as those of nobody may.
    """
    count, heads, width = query.shape
    kv_heads, block_size = keys.shape[2], keys.shape[3]
    cache_positions = torch.arange(rows.longest, device=query.device)  # [C]
    sequences = rows.sequences[:, None]
    planes = rows.planes[:, None].expand(-1, rows.longest)  # [R, C]
    blocks = (
        sequences if rows.block_tables is None else rows.block_tables[sequences, cache_positions // block_size].long()
    )
    blocks, offsets = blocks.expand_as(planes), (cache_positions % block_size).expand_as(planes)
    wide = torch.promote_types(query.dtype, torch.float32)
    own_keys, own_values = (part[planes, blocks, :, offsets].to(wide) for part in (keys, values))  # [R, C, H_kv, d]
    grouped = query.to(wide).view(count, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("rkgd,rckd->rkgc", grouped, own_keys) * scaling
    seen = cache_positions <= rows.cache_positions[:, None]
    if rows.starts is not None:
        seen &= cache_positions >= rows.starts[rows.sequences][:, None]
    if rows.seen is not None:
        seen &= rows.seen[rows.sequences, : rows.longest]
    # not -inf: the softmax of nothing is NaN, which spreads: oneDNN's bfloat16 products may read beyond a row
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
    # what is hidden may hold anything, and 0 times NaN is NaN
    own_values = own_values.masked_fill(~seen[..., None, None], 0.0)
    attended = torch.einsum("rkgc,rckd->rkgd", scores.softmax(-1), own_values)
    return attended.reshape(count, heads, width).to(query.dtype)


def depth_attention(query: Tensor, keys: Tensor, values: Tensor, rows: DepthRows, scaling: float) -> Tensor:
    """`depth_attention_reference` in one launch of a Triton kernel.

    Where the keys of a row are split depends on its own position alone, and parts are joined in one order, so that the
    bits of a row do not depend on the rows beside it, nor on the bound on their positions.

    Args:
        query: `[R, H, d]`.
        keys: `[planes, blocks, H_kv, block_size, d]`, d side by side.
        values: As `keys`.
        rows: Sequence, position and plane of each row.
        scaling: Factor on the scores.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    count, heads, width = query.shape
    _check(query, keys, values, rows)
    kv_heads, block_size = keys.shape[2], keys.shape[3]
    tile = tile_for(width, query.dtype)
    splits = splits_for(rows.longest, tile, PART_TILES)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not count:
        return output
    parts, sums, arrived = parts_of(query, kv_heads, splits, rows.arrived)
    nothing = rows.sequences
    _part_kernel[(count, kv_heads, splits)](
        query,
        keys,
        values,
        rows.sequences,
        rows.cache_positions,
        rows.planes,
        nothing if rows.starts is None else rows.starts,
        nothing if rows.seen is None else rows.seen,
        nothing if rows.block_tables is None else rows.block_tables,
        output,
        parts,
        sums,
        arrived,
        scaling,
        kv_heads,
        heads // kv_heads,
        width,
        block_size,
        splits,
        query.stride(0),
        query.stride(1),
        *keys.stride()[:4],
        *values.stride()[:4],
        0 if rows.seen is None else rows.seen.stride(0),
        0 if rows.block_tables is None else rows.block_tables.stride(0),
        STARTS=rows.starts is not None,
        SEEN=rows.seen is not None,
        PAGED=rows.block_tables is not None,
        GROUP=max(SMALLEST_TILE, triton.next_power_of_2(heads // kv_heads)),
        TILE=tile,
        WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(width)),
        PART_TILES=PART_TILES,
        MOST_PARTS=MOST_PARTS,
        # Triton's interpreter multiplies bfloat16 matrices wrongly
        UPCAST=query.dtype == torch.bfloat16 and not isinstance(_part_kernel, triton.JITFunction),
        num_warps=PART_WARPS,
        **options_for(query.dtype, rows.block_tables is not None, rows.seen is not None),
        **launch_options(query.device),
    )
    return output


def parts_of(query: Tensor, kv_heads: int, splits: int, arrived: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What parts of the keys are left in, and how many of each row and K/V head have ended.

    Args:
        query: `[R, H, d]`.
        kv_heads: H_kv.
        splits: Parts at most.
        arrived: Zeros that there are, as `DepthRows` has them.

    Returns:
        Weighted values, float32 `[R, H, splits, d]`; maximum and sum, float32 `[R, H, splits, SUMS]`; int32 zeros.
    """
    count, heads, width = query.shape
    parts = torch.empty((count, heads, splits, width), dtype=torch.float32, device=query.device)
    sums = torch.empty((count, heads, splits, SUMS), dtype=torch.float32, device=query.device)
    if arrived is None:
        arrived = torch.zeros(count * kv_heads, dtype=torch.int32, device=query.device)
    return parts, sums, arrived


def tile_for(width: int, dtype: torch.dtype) -> int:
    """Positions of one step: 64 of 128 numbers in half precision, fewer where they are larger, as registers allow."""
    # heads that start at no multiple of 16 numbers take more addresses, and those are registers too
    most = 128 if dtype.itemsize == 2 else 64 if width % 16 == 0 else 32
    return max(SMALLEST_TILE, min(most, 16384 // (int(triton.next_power_of_2(width)) * dtype.itemsize)))


def options_for(dtype: torch.dtype, paged: bool, seen: bool) -> dict[str, int]:
    """What keeps it from spilling: in float32 a pipeline that is no deeper, in half precision registers."""
    return ({"num_stages": 1} if paged else {}) if dtype == torch.float32 else REGISTERS if seen else {}


def splits_for(longest: int, tile: int, part_tiles: int) -> int:
    """Parts that the keys of any row up to a bound on their positions have at most."""
    return max(1, min(-(-longest // (part_tiles * tile)), MOST_PARTS))


def _check(query: Tensor, keys: Tensor, values: Tensor, rows: DepthRows) -> None:
    heads, width = query.shape[1:]
    if keys.shape != values.shape or keys.shape[4] != width or heads % keys.shape[2]:
        raise ValueError(f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}")
    if {keys.dtype, values.dtype} != {query.dtype}:
        raise ValueError(f"query {query.dtype}, keys {keys.dtype} and values {values.dtype} must share one dtype")
    if query.stride(2) != 1 or keys.stride(4) != 1 or values.stride(4) != 1:
        raise ValueError("the numbers of a head must lie side by side")
    for name in ("sequences", "cache_positions", "planes", "starts"):
        index = getattr(rows, name)
        if index is not None and not index.is_contiguous():
            raise ValueError(f"{name} must lie side by side, got strides {index.stride()}")
    for name in ("seen", "block_tables"):
        table = getattr(rows, name)
        if table is not None and table.stride(1) != 1:
            raise ValueError(f"the cache positions of {name} must lie side by side")
        if table is not None and name == "seen" and table.shape[1] < rows.longest:
            raise ValueError(f"{name} knows {table.shape[1]} cache positions, and {rows.longest} are read")


if wants_triton():
    import triton
    import triton.language as tl

    # A kernel reads no global but a constexpr: the constants above, for it.
    _MAXIMUM, _TOTAL, _SUMS = tl.constexpr(MAXIMUM), tl.constexpr(TOTAL), tl.constexpr(SUMS)

    @triton.jit
    def attend_tile(q, k, v, inside, scaling, highest, total, summed):
        """A step of the online softmax: maximum, sum and weighted values after the keys of a tile."""
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # exp(-inf - -inf) would be NaN: as long as nothing was seen, the sums are 0 and stay it
        shift = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp(scores - shift[:, None])
        old = tl.exp(highest - shift)
        total = total * old + tl.sum(weights, axis=1)
        summed = summed * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        return new_highest, total, summed

    @triton.jit
    def finish_part(
        highest,
        total,
        summed,
        output_ptr,
        parts_ptr,
        sums_ptr,
        arrived_ptr,
        row,
        kv_head,
        kv_heads,
        group,
        width,
        split,
        splits,
        count,
        GROUP: tl.constexpr,
        MOST_PARTS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """Writes one of the parts of a row and K/V head; the last that ends joins them, by their number."""
        numbers = tl.arange(0, WIDTH)
        members = tl.arange(0, GROUP)
        first_head = (row * kv_heads + kv_head) * group
        head = first_head + members
        wanted = (members < group)[:, None] & (numbers < width)[None, :]
        if count == 1:
            tl.store(output_ptr + head[:, None] * width + numbers[None, :], summed / total[:, None], mask=wanted)
        else:
            split_at = head * splits + split
            tl.store(sums_ptr + split_at * _SUMS + _MAXIMUM, highest, mask=members < group)
            tl.store(sums_ptr + split_at * _SUMS + _TOTAL, total, mask=members < group)
            tl.store(parts_ptr + split_at[:, None] * width + numbers[None, :], summed, mask=wanted)
            # all threads have written before one of them says so
            tl.debug_barrier()
            arrived = tl.atomic_add(arrived_ptr + row * kv_heads + kv_head, 1, sem="acq_rel", scope="gpu")
            if arrived == count - 1:
                tl.store(arrived_ptr + row * kv_heads + kv_head, 0)
                part = tl.arange(0, MOST_PARTS)
                there = part < count
                where = there[:, None] & (numbers < width)[None, :]
                for member in range(0, group):
                    at = (first_head + member) * splits + part
                    high = tl.load(
                        sums_ptr + at * _SUMS + _MAXIMUM, mask=there, other=-float("inf"), cache_modifier=".cg"
                    )
                    current = tl.load(sums_ptr + at * _SUMS + _TOTAL, mask=there, other=0.0, cache_modifier=".cg")
                    # a part without a cache position has the maximum -inf and weighs nothing
                    weight = tl.exp(high - tl.max(high))
                    values = tl.load(
                        parts_ptr + at[:, None] * width + numbers[None, :], mask=where, other=0.0, cache_modifier=".cg"
                    )
                    joined = tl.sum(values * weight[:, None], axis=0) / tl.sum(current * weight)
                    tl.store(output_ptr + (first_head + member) * width + numbers, joined, mask=numbers < width)

    @triton.jit
    def _part_kernel(
        query_ptr,
        keys_ptr,
        values_ptr,
        sequences_ptr,
        row_positions_ptr,
        row_planes_ptr,
        starts_ptr,
        seen_ptr,
        block_tables_ptr,
        output_ptr,
        parts_ptr,
        sums_ptr,
        arrived_ptr,
        scaling,
        kv_heads,
        group,
        width,
        block_size,
        splits,
        query_row_stride,
        query_head_stride,
        key_plane_stride,
        key_block_stride,
        key_head_stride,
        key_position_stride,
        value_plane_stride,
        value_block_stride,
        value_head_stride,
        value_position_stride,
        seen_row_stride,
        block_tables_row_stride,
        STARTS: tl.constexpr,
        SEEN: tl.constexpr,
        PAGED: tl.constexpr,
        GROUP: tl.constexpr,
        TILE: tl.constexpr,
        WIDTH: tl.constexpr,
        PART_TILES: tl.constexpr,
        MOST_PARTS: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)
        sequence = tl.load(sequences_ptr + row)
        last = tl.load(row_positions_ptr + row)
        plane = tl.load(row_planes_ptr + row)
        first = tl.load(starts_ptr + sequence) if STARTS else last * 0
        # every part takes whole tiles, so that they are aligned however long the context is
        tiles = ((last + 1 - first).to(tl.int32) + TILE - 1) // TILE
        tiles_each = (tiles + MOST_PARTS * PART_TILES - 1) // (MOST_PARTS * PART_TILES) * PART_TILES
        count = tl.maximum(tl.cdiv(tiles, tl.maximum(tiles_each, 1)), 1)
        if split >= count:
            return
        begin = first + split * tiles_each * TILE
        end = tl.minimum(begin + tiles_each * TILE, last + 1)

        numbers = tl.arange(0, WIDTH)
        members = tl.arange(0, GROUP)
        head = kv_head * group + members
        wanted = (members < group)[:, None] & (numbers < width)[None, :]
        q = tl.load(
            query_ptr + row * query_row_stride + head[:, None] * query_head_stride + numbers[None, :],
            mask=wanted,
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        # a row before its sequence's start sees nothing, and joins to 0 / 1
        highest = tl.full([GROUP], 0.0, tl.float32) + tl.where(first > last, 0.0, -float("inf"))
        total = tl.full([GROUP], 0.0, tl.float32) + tl.where(first > last, 1.0, 0.0)
        summed = tl.zeros([GROUP, WIDTH], tl.float32)
        for start in range(begin, end, TILE):
            cache_positions = start + tl.arange(0, TILE)
            inside = cache_positions < end
            # a quotient of 32 bits is an instruction or few, one of 64 a call that takes registers
            in_blocks = cache_positions.to(tl.int32)
            block = (
                tl.load(
                    block_tables_ptr + sequence * block_tables_row_stride + in_blocks // block_size,
                    mask=inside,
                    other=0,
                ).to(tl.int64)
                if PAGED
                else sequence
            )
            offset = (in_blocks % block_size).to(tl.int64) if PAGED else cache_positions
            if SEEN:
                inside = inside & (
                    tl.load(seen_ptr + sequence * seen_row_stride + cache_positions, mask=inside, other=0) != 0
                )
            where = inside[:, None] & (numbers < width)[None, :]
            key_at = (
                plane * key_plane_stride
                + block * key_block_stride
                + kv_head * key_head_stride
                + offset * key_position_stride
            )
            value_at = (
                plane * value_plane_stride
                + block * value_block_stride
                + kv_head * value_head_stride
                + offset * value_position_stride
            )
            k = tl.load(keys_ptr + key_at[:, None] + numbers[None, :], mask=where, other=0.0)
            v = tl.load(values_ptr + value_at[:, None] + numbers[None, :], mask=where, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            highest, total, summed = attend_tile(q, k, v, inside, scaling, highest, total, summed)
        finish_part(
            highest, total, summed, output_ptr, parts_ptr, sums_ptr, arrived_ptr, row, kv_head, kv_heads, group, width,
            split, splits, count, GROUP, MOST_PARTS, WIDTH,
        )  # fmt: skip
