"""Attention over spans against one row at a time in float64, with everything poisoned that a row must not read."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigma0.kernels.span_attention import span_attention, spans_of

SCALING = 0.3


@dataclass(frozen=True)
class Row:
    """One row: its plane, where its sequence lies, and which of its cache positions it sees."""

    plane: int
    base: int
    capacity: int
    start: int
    stop: int

    @property
    def first(self):
        return self.base + self.start

    @property
    def room(self):
        return self.capacity - self.start

    @property
    def length(self):
        return self.stop - self.start


def spans(rows):
    return spans_of(*([getattr(row, name) for row in rows] for name in ("plane", "first", "room", "length")))


def one_at_a_time(query, keys, values, row):
    """`[H, d]` in float64."""
    repeats, heads = query.shape[0] // keys.shape[2], []
    for head in range(query.shape[0]):
        seen = (row.plane, slice(row.first, row.first + row.length), head // repeats)
        weights = (keys[seen].double() @ query[head].double() * SCALING).softmax(0)
        heads.append(weights @ values[seen].double())
    return torch.stack(heads)


def drawn_rows(rng, loops, batch, capacity, padded, prompts):
    """Rows of any subset of sequences at any planes, some of them stretches of a prompt; and how many positions."""
    bases = rng.permutation(batch) if rng.random() < 0.3 else np.arange(batch)
    starts = rng.integers(0, capacity // 2, batch) if padded else np.zeros(batch, dtype=int)
    if rng.random() < 0.5:
        starts[:] = starts[0]
    rows = []
    for plane in reversed(range(loops)):
        for sequence in np.sort(rng.choice(batch, size=rng.integers(1, batch + 1), replace=False)):
            start = int(starts[sequence])
            first = int(rng.integers(start, capacity))
            count = int(rng.integers(1, capacity - first + 1)) if prompts and rng.random() < 0.5 else 1
            base = int(bases[sequence]) * capacity
            rows += [Row(plane, base, capacity, start, stop) for stop in range(first + 1, first + 1 + count)]
    return rows, batch * capacity + 1


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 3]),
    repeats=st.sampled_from([1, 2]),
    loops=st.integers(1, 4),
    capacity=st.sampled_from([7, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padded=st.booleans(),
    prompts=st.booleans(),
)
def test_any_rows_against_one_row_at_a_time(seed, batch, kv_heads, repeats, loops, capacity, dtype, padded, prompts):
    """NaN stands wherever no row of a span may read; what a row reads and must not see is large."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, positions = drawn_rows(rng, loops, batch, capacity, padded, prompts)
    shape = (loops, positions, kv_heads, 5)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(len(rows), kv_heads * repeats, 5, generator=generator).to(dtype)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    result = spans(rows)
    assert [row for span in result for row in range(span.start, span.stop)] == list(range(len(rows)))
    read = torch.zeros(shape[:2], dtype=torch.bool)
    seen = torch.zeros(shape[:2], dtype=torch.bool)
    for span in result:
        for row in rows[span.start : span.stop]:
            # no row of a span reads past what belongs to its sequence
            read[row.plane, row.first : row.first + min(max(span.lengths), row.room)] = True
            seen[row.plane, row.first : row.first + row.length] = True
    for part in (keys, values):
        part[~read] = torch.nan
        part[read & ~seen] = 1e3
    attended = span_attention(query, keys, values, result, SCALING)
    assert attended.shape == query.shape and attended.dtype == dtype
    for index, row in enumerate(rows):
        expected = one_at_a_time(query[index], keys, values, row)
        torch.testing.assert_close(attended[index].double(), expected, rtol=rtol, atol=atol)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.bfloat16]), padded=st.booleans())
def test_no_row_reads_what_another_sequence_wrote(seed, dtype, padded):
    """With NaN in all that is not its own sequence's at its plane, from its start on, a row tells what it told."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, positions = drawn_rows(rng, 3, 4, 9, padded, prompts=True)
    keys, values = (torch.randn((3, positions, 2, 6), generator=generator).to(dtype) for _ in range(2))
    query, result = torch.randn(len(rows), 4, 6, generator=generator).to(dtype), spans(rows)
    expected = span_attention(query, keys, values, result, SCALING)
    for index, row in enumerate(rows):
        poisoned = []
        for part in (keys, values):
            poisoned.append(torch.full_like(part, torch.nan))
            current = row.plane, slice(row.first, row.base + row.capacity)
            poisoned[-1][current] = part[current]
        assert torch.equal(span_attention(query, *poisoned, result, SCALING)[index], expected[index])


def test_rows_of_a_plane_share_a_call_and_no_others_do():
    def stretches(*rows):
        return [(span.start, span.stop, span.step) for span in spans(rows)]

    batch = [Row(2, 40 * item, 40, 0, 20) for item in range(4)]
    assert stretches(*batch) == [(0, 4, 40)]
    assert stretches(*batch[::2], Row(1, 0, 40, 0, 20)) == [(0, 2, 80), (2, 3, 0)]
    # unevenly apart, backwards, at another plane
    assert stretches(batch[0], batch[1], batch[3]) == [(0, 2, 40), (2, 3, 0)]
    assert stretches(batch[1], batch[0]) == [(0, 1, 0), (1, 2, 0)]
    assert stretches(batch[0], Row(1, 40, 40, 0, 20)) == [(0, 1, 0), (1, 2, 0)]
    # one that is far longer, and one whose sequence ends before the other's length
    assert stretches(batch[0], Row(2, 40, 400, 0, 57)) == [(0, 1, 0), (1, 2, 0)]
    assert stretches(Row(2, 0, 20, 0, 20), Row(2, 20, 40, 0, 21)) == [(0, 1, 0), (1, 2, 0)]
    assert stretches(Row(2, 0, 21, 0, 20), Row(2, 21, 40, 0, 21)) == [(0, 2, 21)]
    # a prompt, however long, and what follows it
    prompt = [Row(0, 40, 40, 3, stop) for stop in range(4, 40)]
    assert stretches(*prompt, Row(0, 80, 40, 3, 9)) == [(0, 36, 0), (36, 37, 0)]
    assert spans([]) == ()
    # scattered blocks, told by numbers of their sequences: only rows of one sequence
    assert stretches(Row(0, -3, 40, 0, 4), Row(0, -3, 40, 0, 5), Row(0, -2, 40, 0, 5)) == [(0, 2, 0), (2, 3, 0)]
    assert stretches(Row(0, -1, 40, 0, 4), Row(0, 0, 40, 0, 5), Row(0, 40, 40, 0, 5)) == [(0, 1, 0), (1, 3, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planes_may_be_a_part_of_a_larger_tensor(dtype):
    """A stretch begins where its tensor does, not where its storage does."""
    whole = torch.full((2, 5, 12, 2, 7), torch.nan, dtype=dtype)
    keys, values = whole[:, 1:4, 2:, :, 1:6]
    for part in (keys, values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(0)))
    rows = [Row(plane, 5 * item, 5, 0, 3 + item) for plane in (2, 1) for item in range(2)]
    query = torch.randn(len(rows), 2, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    result = span_attention(query, keys, values, spans(rows), SCALING)
    for index, row in enumerate(rows):
        expected = one_at_a_time(query[index], keys, values, row)
        torch.testing.assert_close(result[index].double(), expected, rtol=2e-2, atol=2e-2)


def test_keys_and_values_are_read_in_place():
    """The largest tensor that a call allocates is none of the size of what it reads."""
    rows = [Row(0, 512 * item, 512, 0, 400 + item) for item in range(4)]
    keys, values = torch.randn(2, 1, 2048, 4, 32)
    query, result = torch.randn(4, 4, 32), spans(rows)
    assert len(result) == 1
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        span_attention(query, keys, values, result, 1 / math.sqrt(32))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < keys.nbytes / 16
