"""Under `verify` drawn texts follow the law of full depth, however often their tokens are drawn anew on the way.

First the rule alone: what comes out follows the law of the deeper loop, whatever the draft's was.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from sigma0 import ExitConfig
from sigma0.decode.sampling import OWN_DRAW, accept_drawn, distribution, draw, uniform
from sigma0.decode.sampling_params import SamplingSettings, SequenceSampling
from tests.decode.test_conformance import written
from tests.decode.test_random_numbers import deviation
from tests.marks import exhaustive, slow
from tests.models.raven_reference import tiny_raven
from tests.reference import tiny_model

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


FULL = ExitConfig(mode="full")
FIRST = ExitConfig(mode="fixed", depth=1, after_exit="verify")
TEMPERATURE, PROMPT, EOS = 0.3, (1, 4, 2), 3


@pytest.fixture(scope="module")
def small():
    """Loops that disagree: about two drafts in five are drawn anew before loop T."""
    model = tiny_model(
        seed=5, vocab_size=6, total_ut_steps=4, num_hidden_layers=1, hidden_size=16, intermediate_size=16
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(1.5)
            layer.post_attention_layernorm_2.weight.fill_(1.5)
    return model


def run(model, ids, config, new=3, **asked):
    draws = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    return written(model, ids.tolist(), config, new, **draws, **asked)


def joint_law(model, config, draws, eos=None, company=False):
    """How often each text of three tokens is drawn after the prompt."""
    torch.manual_seed(0)
    ids, mask = torch.tensor([PROMPT]).expand(500, -1), torch.ones(500, len(PROMPT), dtype=torch.int64)
    if company:  # every other row is a longer prompt, and the rows that count are padded
        ids, mask = torch.tensor([[0, 0, *PROMPT], [3, 3, 1, 5, 2]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        ids, mask = ids.repeat(250, 1), mask.repeat(250, 1)
    counts = Counter()
    while counts.total() < draws:
        result = run(model, ids, config, attention_mask=mask, eos_token_id=eos)
        texts = result.sequences[:: 2 if company else 1, ids.shape[1] :].tolist()
        counts.update(tuple(cut(text, eos)) for text in texts)
    return counts


def cut(text, eos):
    return text[: text.index(eos) + 1] if eos in text else text


def exact_law(model, eos=None):
    """Probability of every text, from full depth in float64."""
    law = Counter()
    for text in np.ndindex(*(model.config.vocab_size,) * 3):
        ids = torch.tensor([[*PROMPT, *text]])
        with torch.no_grad():
            logits = model(ids, exit_config=FULL).logits[0, len(PROMPT) - 1 : -1].double() / TEMPERATURE
        probs = torch.softmax(logits, -1)
        kept = cut(list(text), eos)
        # Texts that share a beginning up to its end add up to the chance of that beginning.
        law[tuple(kept)] += float(torch.stack([probs[index, token] for index, token in enumerate(text)]).prod())
    return law


@pytest.mark.parametrize(
    "config, eos, company, draws",
    [
        slow(ExitConfig(mode="converge", eps=0.6, after_exit="verify"), None, "raven", 4_000),
        slow(FIRST, None, False, 4_000),
        exhaustive(FIRST, None, False, 20_000),
        exhaustive(replace(FIRST, redraft=False), None, False, 20_000),
        exhaustive(ExitConfig(q=0.6, after_exit="verify"), EOS, False, 20_000),
        exhaustive(ExitConfig(mode="margin", theta=0.3, after_exit="verify"), EOS, True, 20_000),
    ],
    ids=["raven", "fixed, few draws", "fixed", "one draft", "qexit with an end", "margin in company"],
)
def test_drawn_texts_follow_the_law_of_full_depth(small, config, eos, company, draws):
    if company == "raven":
        small, company = tiny_raven("pre", 39, vocab_size=6, n_layers_in_coda=1), False
    law, counts = exact_law(small, eos), joint_law(small, config, draws, eos, company)
    assert sum(law.values()) == pytest.approx(1.0)
    assert abs(deviation(*(torch.tensor([item[text] for text in law]) for item in (counts, law)))) < 4


def test_draws_do_not_depend_on_the_company(small):
    config = ExitConfig(q=0.6, after_exit="verify")
    texts = []
    for company in ([[1, 2, 3]], [[1, 2, 3], [5, 4, 0]], [[1, 2, 3], [0, 0, 1], [2, 2, 2]]):
        torch.manual_seed(3)
        result = run(small, torch.tensor(company), config, 10)
        texts.append(result.sequences[0].tolist())
    # The first sequence's generator is seeded from as many draws as there are sequences, the first of them its own.
    assert texts[0] == texts[1] == texts[2]
