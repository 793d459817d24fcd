"""Attention over coded planes on a CPU: `coded_attention.py` in C++, which decodes while it reads.

Formula and reference are those of `coded_attention.py`. A number is decoded once for all query heads that share it, in
float32, or in float64 for such queries, and is never written.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sigma0.kernels.coded_attention import CodedRows
from sigma0.kernels.kv_quantizer import CodedPlanes
from sigma0.kernels.native import function
from sigma0.kernels.row_attention import ELEMENTS, check_head_dim


def attend_coded_rows(
    query: Tensor, tails: Sequence[Tensor], coded: Sequence[CodedPlanes], rows: CodedRows, scaling: float
) -> Tensor:
    """As `coded_attention_reference`."""
    query, output = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    count, heads, width = query.shape
    keys, values = coded
    codec = keys.codec
    # bound to names, since the compiled function sees their memory only
    columns = [column.contiguous() for column in (rows.sequences, rows.cache_positions, rows.planes)]
    for name, tail in zip(("keys", "values"), tails, strict=True):
        if tail.dtype is not query.dtype:
            raise ValueError(f"the cache holds {name} in {tail.dtype}, and the model computes in {query.dtype}")
    check_head_dim(width)
    _attend_coded_rows()(
        ELEMENTS[query.dtype],
        tails[0].data_ptr(),
        keys.codes.data_ptr(),
        keys.scales.data_ptr(),
        tails[1].data_ptr(),
        values.codes.data_ptr(),
        values.scales.data_ptr(),
        query.data_ptr(),
        output.data_ptr(),
        *(column.data_ptr() for column in keys.layout),
        *(column.data_ptr() for column in columns),
        *(None if part is None else part.data_ptr() for part in (rows.blocks, rows.starts, rows.seen)),
        -1 if codec.anchor is None else codec.anchor,
        codec.group,
        keys.positions,
        count,
        heads,
        keys.heads,
        width,
        rows.segment,
        rows.size,
        tails[0].shape[1],
        0 if rows.blocks is None else rows.blocks.shape[1],
        0 if rows.seen is None else rows.seen.shape[1],
        scaling,
        torch.get_num_threads(),
    )
    return output


@lru_cache
def _attend_coded_rows() -> Callable[..., None]:
    return function("attend_coded_rows", "n" + 16 * "p" + 12 * "n" + "dn")
