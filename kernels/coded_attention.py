"""Decode attention over coded planes: a row reads its own segment as computed, and all segments before it decoded.

For a row (sequence b, cache position c, loop t), with segments of G cache positions:

    o = softmax over start_b <= j <= c, j no pad, of (q k_j * scaling) v_j
    k_j, v_j = plane t of the tail         G floor(c / G) <= j
               decoded plane t (kv_quantizer.py)        j < G floor(c / G)

What a row reads depends on its position alone, so that a text has the same K/V alone, in company, after a prefix that
was found in the cache, and after a preemption. The tail holds G positions of each sequence in the model's dtype, cache
position j at j mod G; a segment is encoded once all of its tokens have finished the last loop, and until then no
later token enters.

Bytes for each row, K/V head and position of an earlier segment: 2 d (b_t + b_a) / 8 + 4 SCALE_BYTES d / g where plane t
is a residual to anchor a, half of it where not: the minimum, since a decoded number is never written. A position of the
row's own segment takes 2 d bytes of the model's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sigma0.kernels.kv_quantizer import CodedPlanes


@dataclass(frozen=True)
class CodedRows:
    """The rows of one pass over coded planes."""

    sequences: Tensor  # b, int64 `[R]`
    cache_positions: Tensor  # c, -1 of rows that are nobody's, int64 `[R]`
    planes: Tensor  # t counted from 0, int64 `[R]`
    segment: int  # G
    size: int  # Cache positions of a block
    longest: int  # One more than the largest cache position, or a bound on it
    blocks: Tensor | None = None  # Block table, int64 `[S, n]`; None where block s is all of sequence s
    # First cache position of each sequence that is no pad, int64 `[S]`; None where there are no pads
    starts: Tensor | None = None
    # Which cache positions are no pads, bool `[S, C]`, where pads lie after a start too; else None
    seen: Tensor | None = None

    def coded(self, sequence: int, cache_positions: Tensor) -> Tensor:
        """Where cache positions `[N]` of a sequence lie in the coded planes, int64 `[N]`."""
        if self.blocks is None:
            return cache_positions + sequence * self.size
        return self.blocks[sequence, cache_positions // self.size] * self.size + cache_positions % self.size


def coded_attention_reference(
    query: Tensor, tails: Sequence[Tensor], coded: Sequence[CodedPlanes], rows: CodedRows, scaling: float
) -> Tensor:
    """The formula above in plain torch, a row at a time: decode, then attend.

    Args:
        query: `[R, H, d]`.
        tails: Keys and values, each `[planes, S * G + 1, H_kv, d]`.
        coded: Keys and values.
        rows: The rows.
        scaling: Factor on the scores.

    Returns:
        `[R, H, d]`, 0 for rows that are nobody's.
    """
    output = torch.zeros_like(query)
    places = (rows.sequences.tolist(), rows.cache_positions.tolist(), rows.planes.tolist())
    decoded: dict[tuple[int, int, int], list[Tensor]] = {}
    for row, (sequence, last, plane) in enumerate(zip(*places, strict=True)):
        if last < 0:
            continue
        begin = last // rows.segment * rows.segment
        if (sequence, plane, begin) not in decoded:
            at = rows.coded(sequence, torch.arange(begin, device=query.device))
            decoded[sequence, plane, begin] = [planes.read(plane, at) for planes in coded]
        current = sequence * rows.segment
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = (
            torch.cat([early.to(wide), tail[plane, current : current + last - begin + 1].to(wide)])
            for early, tail in zip(decoded[sequence, plane, begin], tails, strict=True)
        )  # [c + 1, H_kv, d]
        seen = _seen(rows, sequence, last)
        output[row] = _attend(query[row].to(wide), keys[seen], values[seen], scaling).to(query.dtype)
    return output


def _seen(rows: CodedRows, sequence: int, last: int) -> Tensor:
    """Which cache positions up to the last one are no pads, bool `[c + 1]`; the row's own is always seen."""
    positions = torch.arange(last + 1, device=rows.sequences.device)
    seen = torch.ones_like(positions, dtype=torch.bool)
    if rows.starts is not None:
        seen &= positions >= rows.starts[sequence].clamp_max(last)
    return seen if rows.seen is None else seen & rows.seen[sequence, : last + 1]


def _attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    grouped = query.view(keys.shape[1], -1, query.shape[-1])  # [H_kv, H / H_kv, d]
    weights = (torch.einsum("kgd,nkd->kgn", grouped, keys) * scaling).softmax(-1)
    return torch.einsum("kgn,nkd->kgd", weights, values).reshape(query.shape)
