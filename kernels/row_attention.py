"""Attention of the rows of a pass on a CPU: `depth_attention.py` in C++, which also writes the rows' own K/V.

Formula and reference are those of `depth_attention.py`. Each row reads K/V in place, wherever its blocks lie, and every
head of K/V once: 2 (c - start + 1) d b bytes for each row and K/V head. The sums are in float32, or in
float64 for such K/V. torch's own attention takes one call for each stretch of a plane, 10 us each (`span_attention.py`,
which needs no library).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels.native import function
from sigma0.kernels.operators import row_op

# Types of numbers as the functions in C++ count them.
ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Numbers of a head there, at most.
MOST_HEAD_DIM = 512


@dataclass(frozen=True)
class RowPlaces:
    """The rows of one pass, and where the cache positions of their sequences lie; all contiguous."""

    sequences: Tensor  # int64 `[R]`
    cache_positions: Tensor  # Cache position of each row, -1 of rows that are nobody's, int64 `[R]`
    planes: Tensor  # Loop of each, counted from 0, int64 `[R]`
    count: int  # Blocks of a plane, which all are of one size
    blocks: Tensor | None = None  # Block table, int64 `[S, n]`; None where block s is all of sequence s
    # First cache position of each sequence that is no pad, int64 `[S]`; None where there are no pads
    starts: Tensor | None = None
    # Which cache positions are no pads, bool `[S, C]`, where pads lie after a start too; else None
    seen: Tensor | None = None


def attend_rows(
    keys: Tensor, values: Tensor, query: Tensor, new_keys: Tensor, new_values: Tensor, rows: RowPlaces, scaling: float
) -> Tensor:
    """Writes the K/V of rows, then attends; in a compiled graph the operator `sigma0::attend_rows`.

    Args:
        keys: Keys of one layer, `[planes, positions, H_kv, d]`, contiguous; written. The last position is nobody's.
        values: As `keys`.
        query: `[R, H, d]`.
        new_keys: `[R, H_kv, d]`.
        new_values: `[R, H_kv, d]`.
        rows: The rows.
        scaling: Factor on the scores.

    Returns:
        `[R, H, d]`, 0 for rows that are nobody's.

    Raises:
        ValueError: For K/V of another dtype.
    """
    return _attend_rows(
        keys,
        values,
        query,
        new_keys,
        new_values,
        rows.sequences,
        rows.cache_positions,
        rows.planes,
        rows.count,
        rows.blocks,
        rows.starts,
        rows.seen,
        scaling,
    )


def _attended_shape(keys: Tensor, values: Tensor, query: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@row_op(_attended_shape, writes=("keys", "values"))
def _attend_rows(
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    sequences: Tensor,
    cache_positions: Tensor,
    planes: Tensor,
    count: int,
    blocks: Tensor | None,
    starts: Tensor | None,
    seen: Tensor | None,
    scaling: float,
) -> Tensor:
    check_planes(query.dtype, keys, values)
    # bound to names, since the compiled function sees their memory only
    query, new_keys, new_values = query.contiguous(), new_keys.contiguous(), new_values.contiguous()
    sequences, cache_positions, planes = sequences.contiguous(), cache_positions.contiguous(), planes.contiguous()
    output = torch.empty_like(query)
    rows, heads, width = query.shape
    positions = keys.shape[1]
    check_head_dim(width)
    _attend_in_place()(
        ELEMENTS[query.dtype],
        keys.data_ptr(),
        values.data_ptr(),
        query.data_ptr(),
        new_keys.data_ptr(),
        new_values.data_ptr(),
        output.data_ptr(),
        sequences.data_ptr(),
        cache_positions.data_ptr(),
        planes.data_ptr(),
        None if blocks is None else blocks.data_ptr(),
        None if starts is None else starts.data_ptr(),
        None if seen is None else seen.data_ptr(),
        rows,
        heads,
        keys.shape[2],
        width,
        (positions - 1) // count,
        positions,
        0 if blocks is None else blocks.shape[1],
        0 if seen is None else seen.shape[1],
        query.stride(0),
        new_keys.stride(0),
        scaling,
        torch.get_num_threads(),
    )
    return output


def check_head_dim(head_dim: int) -> None:
    """Refuses heads that the functions have no room for.

    Raises:
        ValueError: Naming the width.
    """
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"heads of {head_dim} numbers, and {MOST_HEAD_DIM} at most: load with backend='torch'")


def check_planes(dtype: torch.dtype, keys: Tensor, values: Tensor) -> None:
    """Refuses K/V of another dtype than that of the rows, of which the compiled functions see the memory only.

    Raises:
        ValueError: Naming both.
    """
    if keys.dtype is not dtype or values.dtype is not dtype:
        raise ValueError(f"the cache holds K/V in {keys.dtype}, and the model computes in {dtype}: begin a new cache")


@lru_cache
def _attend_in_place() -> Callable[..., None]:
    return function("attend_rows", "n" + 12 * "p" + 10 * "n" + "dn")
