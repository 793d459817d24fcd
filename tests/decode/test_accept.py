"""The rule of `verify` for draws: what comes out follows the law of the deeper loop, whatever the draft's was."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from sigma0.decode.sampling import OWN_DRAW, accept_drawn, distribution, draw, uniform
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling
from tests.decode.test_random_numbers import deviation

COUNT = 100_000
# Weights of eighths: every sum is exact in float32.
LAWS = [law for law in itertools.product(range(9), repeat=3) if sum(law) == 8]


def test_the_law_is_exact_for_every_pair_of_small_laws():
    """Over all pairs of laws in eighths: sum over drafts, tests and redraws, in fractions."""
    steps = 64
    tests = torch.arange(steps) / steps  # each stands for a part 1 / 64 of [0, 1)
    for p, q in itertools.product(LAWS, repeat=2):
        out = [Fraction(0)] * 3
        for draft in range(3):
            if not q[draft]:
                continue
            weights = [torch.tensor([law], dtype=torch.float32).expand(steps, 3) / 8 for law in (p, q)]
            stands, rest = accept_drawn(torch.full((steps,), draft), *weights, tests)
            # a part counts as a whole if both of its ends fall alike; else where p / q lies within it
            share = min(Fraction(1), Fraction(p[draft], q[draft]))
            assert abs(Fraction(int(stands.sum()), steps) - share) < Fraction(1, steps)
            assert torch.equal(stands, tests.double() < float(share))
            out[draft] += Fraction(q[draft], 8) * share
            left = [Fraction(value) for value in rest[0].tolist()]
            for token in range(3):
                out[token] += Fraction(q[draft], 8) * (1 - share) * left[token] / sum(left)
        assert out == [Fraction(weight, 8) for weight in p]


def drafted(first, later, wrong=None):
    """Ids that come out of a draft by the first scores and tests by the later ones, one loop after the other."""
    rows = SamplingSettings(1, torch.device("cpu"))
    rows.set(0, SequenceSampling(draws=True, seed=3))
    program, at, positions = rows.program(), torch.zeros(COUNT, dtype=torch.int64), torch.arange(COUNT)
    scores = first.expand(COUNT, -1)
    ids = draw(rows, program, scores, at, positions, OWN_DRAW)
    q = distribution(rows, program, scores, at)
    for number, scores in enumerate(later, start=2):
        loop = torch.full((COUNT,), number)
        p = distribution(rows, program, scores.expand(COUNT, -1), at)
        test = uniform(rows.keys[at], positions, 2 * loop - 1)
        stands, rest = accept_drawn(ids, p, q, test)
        rest = p if wrong == "from p" else rest
        redrawn = draw(rows, program, rest.log(), at, positions, OWN_DRAW if wrong == "redrawn" else 2 * loop)
        ids = ids if wrong == "accepts" else torch.where(stands, ids, redrawn)
        q = q if wrong == "old q" else torch.where(stands[:, None], p, q) if wrong == "old q of the redrawn" else p
    return torch.bincount(ids, minlength=first.shape[0]), torch.softmax(later[-1].double(), -1)


@pytest.mark.grid(fast=5, slow=1)
@pytest.mark.parametrize("vocabulary", [2, 7, 40])
@pytest.mark.parametrize("loops", [1, 3])
def test_what_comes_out_follows_the_deepest_loop(vocabulary, loops):
    source = torch.Generator().manual_seed(vocabulary)
    first, *later = torch.randn(loops + 1, vocabulary, generator=source) * 1.5
    assert abs(deviation(*drafted(first, later))) < 4.5


@pytest.mark.parametrize("wrong", ["from p", "accepts", "old q", "old q of the redrawn", "redrawn"])
def test_a_wrong_rule_fails_the_same_test(wrong):
    source = torch.Generator().manual_seed(7)
    first, *later = torch.randn(3, 7, generator=source) * 1.5
    assert abs(deviation(*drafted(first, later, wrong))) > 8


def test_forbidden_ids_never_come_out_and_equal_laws_always_stand():
    first, later = torch.tensor([0.0, 1.0, 2.0, -math.inf]), torch.tensor([1.0, -math.inf, 0.0, 0.5])
    seen, law = drafted(first, [later])
    assert int(seen[1]) == 0 and abs(deviation(seen[[0, 2, 3]], law[[0, 2, 3]])) < 4.5
    p = torch.softmax(torch.randn(1000, 9, generator=torch.Generator().manual_seed(2)), -1)
    stands, rest = accept_drawn(p.argmax(-1), p, p.clone(), torch.linspace(0, 0.999, 1000))
    assert stands.all() and torch.equal(rest, p)


def test_the_greedy_rule_is_the_same_rule():
    source = torch.Generator().manual_seed(1)
    scores, drafts = torch.randn(200, 4, generator=source), torch.randint(4, (200,), generator=source)
    rows = SamplingSettings(1, torch.device("cpu"))
    rows.set(0, SequenceSampling())
    at, program = torch.zeros(200, dtype=torch.int64), rows.program()
    p, q = distribution(rows, program, scores, at), torch.nn.functional.one_hot(drafts, 4).float()
    stands, rest = accept_drawn(drafts, p, q, uniform(rows.keys[at], torch.arange(200), 1))
    ids = scores.argmax(-1)
    assert torch.equal(stands, drafts == ids) and 0 < int(stands.sum()) < 200
    redrawn = draw(rows, program, rest.log(), at, torch.arange(200), 2)
    assert torch.equal(torch.where(stands, drafts, redrawn), ids)
