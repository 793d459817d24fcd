"""Attention of rows over K/V that lie side by side, read in place: the CPU path of `depth_attention.py`.

Each row reads one stretch of one plane, as under `finish` and `verify` where a sequence's blocks follow each other.
Rows are taken together in *spans*, each one call, without a copy of K/V but where blocks are scattered:

    rows of several sequences   of one plane, whose stretches begin equally far apart: a batch of single queries
    rows of one sequence        of one plane and one first position, as a prompt's: one batch of several queries

Within a span all rows read as far as the longest, and a mask hides what lies after a shorter one's own. That belongs
to its own sequence, so what another sequence wrote is never read, not even to be masked: 0 times NaN is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# A row of a batch of single queries reads at most twice its own length and this many positions more.
_SLACK = 16


@dataclass(frozen=True)
class Span:
    """Adjacent rows of a pass that are attended in one call."""

    start: int  # First row
    stop: int  # One past the last
    plane: int  # The plane, counted from 0
    first: int  # Flat position that the first row reads first
    step: int  # How much further the stretch of each next row begins; 0 for rows of one sequence
    lengths: tuple[int, ...]  # Positions that each row sees
    # Where `first` is negative: the flat positions of the longest row, int64 `[longest]`; K/V are copied
    positions: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether several rows read the same stretch."""
        return self.step == 0 and self.stop - self.start > 1

    @cached_property
    def longest(self) -> int:
        """Positions that are read."""
        return max(self.lengths)

    @cached_property
    def mask(self) -> Tensor | None:
        """Which of the positions up to the longest each row sees, bool `[N, longest]`; None where all do."""
        if min(self.lengths) == self.longest:
            return None
        return torch.arange(self.longest) < torch.tensor(self.lengths)[:, None]


def spans_of(
    planes: Sequence[int], firsts: Sequence[int], rooms: Sequence[int], lengths: Sequence[int]
) -> tuple[Span, ...]:
    """The spans of rows, in order.

    Args:
        planes: Plane of each row.
        firsts: Flat position that each reads first; where it does not read on from there but here and there, a negative
            number of its sequence's own.
        rooms: Positions from there on that belong to its sequence, at least its length.
        lengths: Positions that each sees, at least 1.
    """
    spans = []
    start, step, room, shortest, longest = 0, 0, 0, 0, 0
    for row in range(len(planes)):
        count = row - start
        if count and planes[row] == planes[start]:
            ahead = firsts[row] - firsts[row - 1]
            both = min(room, rooms[row]), min(shortest, lengths[row]), max(longest, lengths[row])
            evenly = (ahead == 0 or (ahead > 0 and firsts[row - 1] >= 0)) and (count == 1 or ahead == step)
            if evenly and both[2] <= (both[0] if ahead == 0 else min(both[0], 2 * both[1] + _SLACK)):
                step, (room, shortest, longest) = ahead, both
                continue
        if count:
            spans.append(Span(start, row, planes[start], firsts[start], step, tuple(lengths[start:row])))
        start, step, room, shortest, longest = row, 0, rooms[row], lengths[row], lengths[row]
    if len(planes):
        spans.append(Span(start, len(planes), planes[start], firsts[start], step, tuple(lengths[start:])))
    return tuple(spans)


def span_attention(query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], scaling: float) -> Tensor:
    """The attention of every row over its stretch.

    The query heads that share a K/V head take the place of a sequence of queries, so grouped K/V are never repeated.

    Args:
        query: One query for each row, `[R, H, d]`.
        keys: Keys of one layer, `[planes, positions, H_kv, d]`.
        values: As `keys`.
        spans: Together they cover all R rows in order.
        scaling: Factor on the scores.

    Returns:
        `[R, H, d]`.
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, width)
    single = grouped
    repeated = _queries_at_once(query) if heads == kv_heads else 1
    if repeated > 1 and not all(span.shared for span in spans):
        single = grouped.repeat(1, 1, repeated, 1)
    outputs = []
    for span in spans:
        if span.shared:
            outputs.append(_attend_shared(grouped[span.start : span.stop], keys, values, span, scaling))
            continue
        mask = None if span.stop == span.start + 1 or span.mask is None else span.mask[:, None, None]
        attended = F.scaled_dot_product_attention(
            single[span.start : span.stop],
            _stretch(keys, span),
            _stretch(values, span),
            attn_mask=mask,
            scale=scaling,
        )
        outputs.append(attended if repeated == 1 else attended[:, :, :1])
    attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [R, H_kv, H / H_kv, d]
    return attended.reshape(rows, heads, width)


def _attend_shared(query: Tensor, keys: Tensor, values: Tensor, span: Span, scaling: float) -> Tensor:
    """Rows `[N, H_kv, G, d]` of one sequence: its K/V are read once for all of them."""
    count, kv_heads, group, width = query.shape
    queries = query.transpose(0, 1).reshape(1, kv_heads, count * group, width)
    mask = None if span.mask is None else span.mask.repeat_interleave(group, dim=0)  # [N G, length]
    attended = F.scaled_dot_product_attention(
        queries, _stretch(keys, span)[:1], _stretch(values, span)[:1], attn_mask=mask, scale=scaling
    )
    return attended.view(kv_heads, count, group, width).transpose(0, 1)


def _stretch(planes: Tensor, span: Span) -> Tensor:
    """The positions that the rows of a span read, `[N, H_kv, longest, d]`, in place; scattered ones once, copied."""
    if span.positions is not None:
        return planes[span.plane].index_select(0, span.positions).transpose(0, 1)[None]
    assert span.first >= 0, "scattered positions are given one by one"
    _, _, heads, width = planes.shape
    by_plane, by_position, by_head, by_number = planes.stride()
    return planes.as_strided(
        (span.stop - span.start, heads, span.longest, width),
        (span.step * by_position, by_head, by_position, by_number),
        planes.storage_offset() + span.plane * by_plane + span.first * by_position,
    )


def _queries_at_once(query: Tensor) -> int:
    """How often a single query is worth repeating: torch's CPU kernel in half precision is 2.5 times faster for 4.

    (16 heads of 128, 512 positions, bfloat16, one thread, torch 2.13: 2.8 ms for one, 1.1 ms for four; float32 gains
    nothing.)
    """
    return 4 if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16) else 1
