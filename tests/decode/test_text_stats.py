"""Statistics of many texts at once: the same in C++, in Python, and with the certainty of another device."""

from dataclasses import replace

import pytest
import torch

from sigma0.decode.ops import LOGIT_STATS, TORCH
from sigma0.decode.text_stats import TextStats
from sigma0.kernels.collapse_rows import certainty_rows, collapse_rows
from tests.marks import needs_compiler

WAYS = {
    "all in C++": replace(TORCH, collapse_rows=collapse_rows, certainty_rows=certainty_rows),
    "ids in C++": replace(TORCH, collapse_rows=collapse_rows),
}


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [True, False])
def test_ways_tell_the_same(way, read):
    generator = torch.Generator().manual_seed(3)
    ways = [TextStats(TORCH), TextStats(WAYS[way])]
    texts = [[stats.text() for _ in range(4)] for stats in ways]
    for number in range(70):
        # one text fewer every other time, and one that goes in circles
        own = range(4 - number % 2)
        ids = torch.randint(0, 30, (4,), generator=generator).tolist()
        ids = [number % 7, *ids[1 : len(own)]]
        logits = torch.randn(len(own), 40, generator=generator) if read else None
        plain, compiled = (
            stats.take([known[row] for row in own], ids, logits) for stats, known in zip(ways, texts, strict=True)
        )
        assert len(plain) == len(LOGIT_STATS) + 1
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=1e-4, equal_nan=True)
    assert plain[-1][0] > 0.9
    assert torch.tensor(plain[0]).isnan().all() == (not read)
