"""Statistics of texts: the same in C++ and in torch, and when a text that repeats itself is ended."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigma0.decode.ops import LOGIT_STATS, TORCH, operations
from sigma0.decode.repetition import CollapseStop, TextStats
from sigma0.kernels.collapse_rows import certainty_rows, collapse_rows
from tests.marks import needs_compiler

OWN = operations("auto", torch.device("cpu"))
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
        current = range(4 - number % 2)
        ids = torch.randint(0, 30, (4,), generator=generator).tolist()
        ids = [number % 7, *ids[1 : len(current)]]
        logits = torch.randn(len(current), 40, generator=generator) if read else None
        plain, compiled = (
            stats.take([known[row] for row in current], ids, logits) for stats, known in zip(ways, texts, strict=True)
        )
        assert len(plain) == len(LOGIT_STATS) + 1
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=1e-4, equal_nan=True)
    assert plain[-1][0] > 0.9
    assert torch.tensor(plain[0]).isnan().all() == (not read)


def proximities(ids):
    stats = TextStats(OWN)
    return stats.take([stats.text()] * len(ids), ids)[-1]


def ended_at(rule, values):
    """Numbers of ids after which a text is ended."""
    high, ends = 0, []
    for number, value in enumerate(values, start=1):
        high = high + 1 if value >= rule.tau else 0
        if rule.ends_after(number, high):
            ends.append(number)
    return ends


@pytest.mark.parametrize("period", [1, 5, 17, 40])
def test_a_text_is_ended_once_it_has_run_in_circles_for_a_while(period):
    rng, rule = np.random.default_rng(period), CollapseStop()
    ids = [*range(100, 130), *np.resize(rng.permutation(60)[:period], 200).tolist()]
    values = proximities(ids)
    ended = ended_at(rule, values)[0]
    assert 30 + period < ended <= 30 + max(3 * period, 40) + 2 * rule.running
    assert ended % rule.every == 0 and min(values[ended - rule.running : ended]) >= rule.tau


def test_a_text_without_repetition_is_not_ended():
    assert not ended_at(CollapseStop(), proximities(np.random.default_rng(0).integers(0, 400, 600).tolist()))


@pytest.mark.parametrize("running, every", [(1, 1), (3, 1), (4, 4), (5, 3), (16, 4)])
def test_the_last_few_proximities_decide_at_every_few_ids(running, every):
    values = proximities([*range(30), *np.resize(np.arange(9), 60).tolist(), *range(100, 130)])
    # the least of them is reached, too
    for tau in (0.0, 0.3, 0.9, *values[::7]):
        expected = [
            number
            for number in range(running, len(values) + 1)
            if number % every == 0 and min(values[number - running : number]) >= tau
        ]
        assert ended_at(CollapseStop(tau, running, every), values) == expected
    assert max(values) > 0.9 and (CollapseStop().tau, CollapseStop().running, CollapseStop().every) == (0.9, 16, 4)
