"""Random numbers keyed by what they are for: their law, and that nothing else has a part in them."""

import math

import pytest
import torch

from sigma0.decode.ops import PURPOSE, combined, counter_words, gumbel
from sigma0.decode.sampling import OWN_DRAW, uniform
from sigma0.decode.sampling_params import key_of, request_seed, request_seeds

COUNT = 1 << 17


def keys(*seeds):
    return torch.tensor([key_of(seed) for seed in seeds])


def deviation(seen, law):
    """The chi-square statistic of counts in standard deviations from its mean, cells that expect under 5 together."""
    expected = law.double() * seen.sum()
    often = expected >= 5
    seen, expected = (torch.cat([item[often], item[~often].sum()[None]]) for item in (seen, expected))
    seen, expected = seen[expected > 1], expected[expected > 1]
    freedom = seen.numel() - 1
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def even(count):
    return torch.full((count,), 1 / count)


def streams():
    """Each of COUNT numbers: by seed, by position, by purpose and loop, and with all of them at once."""
    numbers = torch.arange(COUNT)
    one = keys(7).expand(COUNT, 2)
    yield "seeds", uniform(keys(*range(COUNT)), torch.zeros_like(numbers), 0)
    yield "positions", uniform(one, numbers, 0)
    yield "purposes", uniform(one, numbers // 512, numbers % 512)
    yield "all", uniform(keys(*range(64)).repeat(COUNT // 64, 1), numbers // 1024, numbers // 64 % 16)
    yield "ids", torch.exp(-torch.exp(-gumbel(keys(3), torch.tensor([5]), 0, COUNT)))[0]


@pytest.mark.parametrize("name, drawn", [pytest.param(*stream, id=stream[0]) for stream in streams()])
def test_numbers_are_uniform_and_neighbours_independent(name, drawn):
    assert (drawn.min() >= 0 and drawn.max() < 1) or name == "ids"
    cells = (drawn * 64).long().clamp_max(63)
    assert abs(deviation(torch.bincount(cells, minlength=64), even(64))) < 4.5
    for step in (1, 2, 16, 64, 512, 1024):
        pairs = cells[:-step] // 4 * 16 + cells[step:] // 4
        assert abs(deviation(torch.bincount(pairs, minlength=256), even(256))) < 4.5, step
    centred = (drawn.double() - 0.5) * math.sqrt(12)
    for step in (1, 3, 31, 128):
        correlation = float((centred[:-step] * centred[step:]).mean())
        assert abs(correlation) * math.sqrt(COUNT) < 4.5, step


@pytest.mark.grid(fast=2, slow=3)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("over", ["positions", "seeds", "purposes"])
def test_draws_follow_the_softmax(scale, over):
    vocabulary = 24
    scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * scale
    zeros, numbers = torch.zeros(COUNT, dtype=torch.int64), torch.arange(COUNT)
    drawn_with = {
        "positions": (keys(11).expand(COUNT, 2), numbers, 0),
        "seeds": (keys(*range(COUNT)), zeros, 0),
        "purposes": (keys(*range(COUNT // 64)).repeat(64, 1), zeros, numbers // (COUNT // 64)),
    }
    ids = (scores + gumbel(*drawn_with[over], vocabulary)).argmax(-1)
    assert abs(deviation(torch.bincount(ids, minlength=vocabulary), torch.softmax(scores.double(), -1))) < 4.5


@pytest.mark.exhaustive
def test_rare_ids_of_a_large_vocabulary_are_drawn_as_often_as_they_should_be():
    """Half of the probability on 50,000 ids of 1e-5 each: how often one of them wins, and each of their parts."""
    vocabulary, draws = 50_000, 4_096
    scores = torch.zeros(vocabulary + 1)
    scores[-1] = math.log(vocabulary)
    zeros = torch.zeros(64, dtype=torch.int64)
    ids = torch.cat(
        [
            (scores + gumbel(keys(*range(first, first + 64)), zeros, 0, vocabulary + 1)).argmax(-1)
            for first in range(0, draws, 64)
        ]
    )
    rare = ids[ids < vocabulary]
    assert abs(len(rare) - draws / 2) < 4.5 * math.sqrt(draws / 4)
    assert abs(deviation(torch.bincount(rare * 20 // vocabulary, minlength=20), even(20))) < 4.5


def test_ids_of_one_draw_are_independent():
    noise = gumbel(keys(*range(4096)), torch.arange(4096), OWN_DRAW, 64).double()  # [4096, 64]
    off = torch.corrcoef(noise.T)[~torch.eye(64, dtype=torch.bool)]
    assert off.abs().max() * math.sqrt(4096) < 5.0


def test_a_number_depends_on_nothing_but_what_it_is_for():
    many, positions = keys(*range(40)), torch.arange(40) * 3
    purposes = torch.arange(40) % 7
    together = gumbel(many, positions, purposes, 600)
    torch.manual_seed(5)
    for row in (0, 1, 17, 39):
        alone = gumbel(many[row : row + 1], positions[row : row + 1], int(purposes[row]), 77)
        assert torch.allclose(alone[0], together[row, :77], rtol=1e-6)
        picked = uniform(many[row : row + 1], positions[row : row + 1], int(purposes[row]))
        assert torch.equal(picked[0], uniform(many, positions, purposes)[row])


def test_a_draw_is_the_upper_part_of_a_word():
    at = keys(7).expand(50, 2), torch.arange(50), 3
    words = counter_words(*at)
    expected = [(int(word) >> 8) / 2**24 for word in combined(words[:, 0], words[:, 1])]
    assert uniform(*at).tolist() == expected and uniform(*at).dtype == torch.float32


@pytest.mark.slow
def test_noise_is_finite_and_reaches_far():
    noise = gumbel(keys(*range(256)), torch.zeros(256, dtype=torch.int64), 0, 50_000)
    assert noise.isfinite().all()
    # the largest of N lies near log N, and no two of the largest are equal
    assert 13.5 < float(noise.max()) < 23
    assert len(noise.flatten().topk(1000).values.unique()) > 990


def test_counters_of_a_sequence_are_all_different():
    factor = 0x9E37_79B1
    inverse = pow(factor, -1, 2**32)
    for apart in range(1, 1024):
        meets = apart * PURPOSE * inverse % 2**32
        assert min(meets, 2**32 - meets) >= 2**21, apart


def test_words_are_the_published_ones():
    # SplitMix64 from state 0: its first output
    assert key_of(0) == (0xE220A839, 0x7B1DCDAF)
    # and its next ones
    gamma = 0x9E3779B97F4A7C15
    assert key_of(gamma) == (0x6E789E6A, 0xA1B965F4) and key_of(2 * gamma) == (0x06C45D18, 0x8009454F)
    assert key_of(2**63 - 1) != key_of(-1) == key_of(2**64 - 1)


def test_seeds_are_drawn_over_the_whole_range():
    torch.manual_seed(3)
    seeds = request_seeds(4)
    drawn = torch.empty(4, dtype=torch.int64).random_(0, 2**63 - 1, generator=torch.Generator().manual_seed(3))
    assert seeds == drawn.tolist() and request_seed(3) == seeds[0]
    # a request alone has the seed of a batch of one
    torch.manual_seed(3)
    assert request_seed(None) == seeds[0]
    assert len({request_seed(None) for _ in range(10)}) == 10
