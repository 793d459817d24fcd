# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, no-check-untyped-defs
"""Query, key and value of the rows of a pass: product, rotary embedding and the write to the K/V plane.

For a normed row x at position p, with W = [W_q; W_k; W_v] packed, and C and S the cosines and sines of p, of which the
first half of S has its sign turned (`models.rotary_table`):

    q, k, v = x W^T,   rot(y) = y C + roll(y, d / 2) S  of every head of q and k

q goes out rotated; rot(k) and v go to the place of the row's loop and cache position in the layer's planes
(`decode.planes`), or nowhere where the row is nobody's. Bytes: (H + 2 H_kv) d D b of weights once, D b + (H + 2 H_kv)
d b for each row.
"""

import torch
from torch import Tensor

from sigma0.kernels.operators import row_op
from sigma0.kernels.row_product import ROW_TILE, check_product, start, tiling_of
from sigma0.presence import wants_triton


def row_qkv_reference(
    hidden: Tensor,
    weight: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    flat_rows: Tensor,
) -> Tensor:
    """The formulas above in plain torch.

    Args:
        hidden: x `[R, D]`.
        weight: W `[(H + 2 H_kv) d, D]`.
        cos: `[P, d]`.
        signed_sin: `[P, d]`.
        positions: p, int64 `[R]`.
        keys: Keys of the layer, `[planes, positions, H_kv, d]`; written.
        values: As `keys`.
        flat_rows: Plane * positions + position that each row writes, all different, -1 for none, int64 `[R]`.

    Returns:
        Rotated queries, `[R, H, d]`.
    """
    kv_heads, width = keys.shape[2:]
    projected = torch.nn.functional.linear(hidden, weight)
    heads = projected.view(len(hidden), -1, width)  # [R, H + 2 H_kv, d]
    turned, new_values = heads[:, :-kv_heads], heads[:, -kv_heads:]
    row_cos, row_sin = cos[positions][:, None], signed_sin[positions][:, None]  # [R, 1, d]
    rotated = torch.addcmul(turned * row_cos, turned.roll(width // 2, -1), row_sin)
    live = flat_rows >= 0
    for planes, new in ((keys, rotated[:, -kv_heads:]), (values, new_values)):
        planes.view(-1, kv_heads, width)[flat_rows[live]] = new[live]
    return rotated[:, :-kv_heads].contiguous()


def _query_shape(
    hidden: Tensor,
    weight: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    flat_rows: Tensor,
) -> Tensor:
    kv_heads, head_width = keys.shape[2:]
    return hidden.new_empty((hidden.shape[0], weight.shape[0] // head_width - 2 * kv_heads, head_width))


@row_op(_query_shape, writes=("keys", "values"))
def row_qkv(
    hidden: Tensor,
    weight: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    flat_rows: Tensor,
) -> Tensor:
    """`row_qkv_reference` in one launch of a Triton kernel.

    Arguments and result are the reference's.

    Raises:
        ValueError: For shapes, dtypes or strides that the kernel does not support.
    """
    _check(hidden, weight, cos, signed_sin, positions, keys, values, flat_rows)
    rows, width = hidden.shape
    kv_heads, head_width = keys.shape[2:]
    heads = weight.shape[0] // head_width - 2 * kv_heads
    query = torch.empty((rows, heads, head_width), dtype=hidden.dtype, device=hidden.device)
    if rows:
        tiling = tiling_of(hidden, weight)
        pairs = tiling.outputs // 2
        parts = triton.cdiv(head_width // 2, pairs)
        start(
            _row_qkv_kernel,
            (triton.cdiv(rows, ROW_TILE), heads + 2 * kv_heads, parts),
            hidden,
            hidden,
            weight,
            cos,
            signed_sin,
            positions,
            flat_rows,
            query,
            keys,
            values,
            rows,
            width,
            heads,
            kv_heads,
            head_width,
            hidden.stride(0),
            PAIRS=pairs,
            STEP=tiling.step,
            UPCAST=upcasts(_row_qkv_kernel, hidden.dtype),
            **tiling.options,
        )
    return query


def _check(
    hidden: Tensor,
    weight: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    flat_rows: Tensor,
) -> None:
    check_product(hidden, weight, cos, signed_sin, keys, values)
    if keys.shape != values.shape or keys.ndim != 4 or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must be two contiguous planes")
    kv_heads, head_width = keys.shape[2:]
    if head_width % 2 or weight.shape[0] % head_width or weight.shape[0] <= 2 * kv_heads * head_width:
        raise ValueError(f"no heads of {head_width} in {weight.shape[0]} outputs beside {kv_heads} of keys and values")
    if cos.shape != signed_sin.shape or cos.shape[1:] != (head_width,):
        raise ValueError(f"tables of {head_width} numbers, got {tuple(cos.shape)} and {tuple(signed_sin.shape)}")
    if not (cos.is_contiguous() and signed_sin.is_contiguous()):
        raise ValueError("the numbers of a table must lie side by side")
    for name, index in (("positions", positions), ("flat_rows", flat_rows)):
        if tuple(index.shape) != hidden.shape[:1] or index.dtype != torch.int64 or not index.is_contiguous():
            output = f"{index.dtype} {tuple(index.shape)} of strides {index.stride()}"
            raise ValueError(f"{name} must be int64 [{len(hidden)}], side by side, got {output}")


if wants_triton():
    import triton
    import triton.language as tl

    from sigma0.kernels.row_product import product, rows_of_tile, upcasts

    # A kernel reads no global but a constexpr.
    _ROW_TILE = tl.constexpr(ROW_TILE)

    @triton.jit(do_not_specialize=["rows"])
    def _row_qkv_kernel(
        hidden_ptr,
        weight_ptr,
        cos_ptr,
        sin_ptr,
        positions_ptr,
        flat_rows_ptr,
        query_ptr,
        keys_ptr,
        values_ptr,
        rows,
        width,
        heads,
        kv_heads,
        head_width,
        hidden_row_stride,
        PAIRS: tl.constexpr,
        STEP: tl.constexpr,
        UPCAST: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row, there = rows_of_tile(tl.program_id(0), rows)
        head = tl.program_id(1)
        half = head_width // 2
        # the numbers that are turned together follow each other: 0 and d / 2, 1 and d / 2 + 1, ...
        pair = tl.arange(0, 2 * PAIRS)
        in_half = tl.program_id(2) * PAIRS + pair // 2
        outputs = head * head_width + (pair % 2) * half + in_half
        total = product(
            hidden_ptr, row * hidden_row_stride, there, weight_ptr, outputs, in_half < half, width, 0, width,
            STEP, UPCAST, PDL,
        )  # fmt: skip
        rounded = total.to(query_ptr.dtype.element_ty).to(tl.float32)
        first, second = tl.split(tl.reshape(rounded, [_ROW_TILE, PAIRS, 2]))

        number = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
        wanted = there[:, None] & (number < half)[None, :]
        turns = (head + tl.zeros_like(number) < heads + kv_heads)[None, :]
        position = tl.load(positions_ptr + row, mask=there, other=0)
        turn_at = position[:, None] * head_width + number[None, :]
        cos_first = tl.load(cos_ptr + turn_at, mask=wanted & turns, other=1.0).to(tl.float32)
        cos_second = tl.load(cos_ptr + turn_at + half, mask=wanted & turns, other=1.0).to(tl.float32)
        sin_first = tl.load(sin_ptr + turn_at, mask=wanted & turns, other=0.0).to(tl.float32)
        sin_second = tl.load(sin_ptr + turn_at + half, mask=wanted & turns, other=0.0).to(tl.float32)
        # a value is not turned, not even by nothing: 0 times infinity is NaN
        turned_first = tl.where(turns, first * cos_first + second * sin_first, first)
        turned_second = tl.where(turns, second * cos_second + first * sin_second, second)
        if head < heads:
            at = (row * heads + head)[:, None] * head_width + number[None, :]
            tl.store(query_ptr + at, turned_first, mask=wanted)
            tl.store(query_ptr + at + half, turned_second, mask=wanted)
        else:
            flat_row = tl.load(flat_rows_ptr + row, mask=there, other=-1)
            written = wanted & (flat_row >= 0)[:, None]
            kv_head = (head - heads) % kv_heads
            at = (flat_row * kv_heads + kv_head)[:, None] * head_width + number[None, :]
            if head < heads + kv_heads:
                tl.store(keys_ptr + at, turned_first, mask=written)
                tl.store(keys_ptr + at + half, turned_second, mask=written)
            else:
                tl.store(values_ptr + at, turned_first, mask=written)
                tl.store(values_ptr + at + half, turned_second, mask=written)
