"""Attention of the rows of a pass over blocks, against the reference, which looks up every position by itself."""

import numpy as np
import pytest
import torch

from sigma0.decode.attention import PassRows, RowIndices
from sigma0.decode.kv_store import BlockShape, PagedPlanes
from sigma0.decode.ops import DepthRows, depth_attention_reference, operations, span_attention

SIZE, PLANES, HEADS, WIDTH = 4, 3, 2, 6
# blocks that follow each other, scattered ones, ones that go backwards, and one alone
BLOCKS = [[2, 3, 4], [9, 1, 5], [8, 7, 6], [0]]


def paged(rows, seed):
    """K/V of four sequences, NaN wherever no sequence has a block or a row of its own may come to read."""
    generator = torch.Generator().manual_seed(seed)
    shape = BlockShape(layers=1, planes=PLANES, kv_heads=HEADS, head_dim=WIDTH, size=SIZE)
    store = PagedPlanes(shape, 12, torch.float32, torch.device("cpu"), sequences=len(BLOCKS), longest=3 * SIZE)
    for sequence, blocks in enumerate(BLOCKS):
        store.place(sequence, blocks)
    (planes,) = store.planes
    known = store.placement(0).flat(rows.sequences, rows.cache_positions)
    for part in (planes.flat_keys, planes.flat_values):
        part.fill_(torch.nan)
        for sequence in set(rows.sequences.tolist()):
            for block in BLOCKS[sequence]:
                current = slice(block * SIZE, (block + 1) * SIZE)
                part[:, current] = torch.randn(PLANES, SIZE, HEADS, WIDTH, generator=generator)
        part[rows.loops, known] = torch.nan  # not yet written
    return store


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk", [1, 3])
def test_scattered_blocks_are_read_like_others(seed, chunk):
    """`chunk` positions of a sequence side by side at a plane, as when tokens catch up."""
    rng = np.random.default_rng(seed)
    lines = []
    for plane in reversed(range(PLANES)):
        for sequence in rng.permutation(len(BLOCKS))[: rng.integers(1, 5)] if seed % 2 else range(len(BLOCKS)):
            last = int(rng.integers(chunk, len(BLOCKS[sequence]) * SIZE + 1))
            lines += [(int(sequence), position, position, plane) for position in range(last - chunk, last)]
    rows = RowIndices(*torch.tensor(lines).unbind(1))
    store, longest = paged(rows, seed), int(rows.cache_positions.max()) + 1
    (planes,), placement = store.planes, store.placement(longest)
    query, (keys, values) = torch.randn(len(lines), 2 * HEADS, WIDTH), torch.randn(2, len(lines), HEADS, WIDTH)
    view = PassRows([planes], placement, rows, operations("torch", torch.device("cpu")), longest)
    result = view.attend(0, query, keys, values, 0.4)
    at = DepthRows(rows.sequences, rows.cache_positions, rows.loops, None, None, placement.blocks.int(), longest)
    expected = depth_attention_reference(query, planes.keys, planes.values, at, 0.4)
    torch.testing.assert_close(result, expected)
    assert result.isfinite().all()


def test_scattered_blocks_do_not_hold_up_the_others(monkeypatch):
    """Rows whose blocks follow each other share a call and are read in place, whoever else is there."""
    rows = RowIndices(torch.tensor([0, 1, 2, 3]), *torch.tensor([3, 7, 9, 2]).expand(2, -1), torch.tensor([1, 1, 1, 1]))
    store, noted = paged(rows, 0), []

    def note(query, keys, values, spans, scaling):
        noted.extend(spans)
        return span_attention(query, keys, values, spans, scaling)

    monkeypatch.setattr("sigma0.decode.attention.span_attention", note)
    view = PassRows(store.planes, store.placement(10), rows, operations("torch", torch.device("cpu")), 10)
    view.attend(0, torch.randn(4, 4, WIDTH), *torch.randn(2, 4, HEADS, WIDTH), 0.4)
    assert [(span.start, span.stop, span.positions is None) for span in noted] == [
        (0, 1, True),
        (1, 2, False),
        (2, 3, False),
        (3, 4, True),
    ]
    assert noted[1].positions.tolist() == [36, 37, 38, 39, 4, 5, 6, 7]
