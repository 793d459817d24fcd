"""A rung with a prelude and a coda below another model: equal to both from scratch, with codas read as they were read.

A token that the rung continues leaves its coda's K/V as of its exit. What others wrote is caught up with like a prompt:
at loop T, but for the last id, which the rung's rule reads.
"""

import pytest
import torch

import sigma0
from sigma0 import ExitConfig
from sigma0.ladder import Always, Entropy, Hysteresis, Margin, Never, Random, Signs
from sigma0.ladder.triggers import Parking
from sigma0.signals.verdict import of_token
from tests.ladder.test_token_unit import TEXTS, check_from_scratch, ladder_of, last_logits, margin_of, told
from tests.models.raven_reference import Reference, Written, tiny_raven

FULL = ExitConfig(mode="full")


@pytest.fixture(scope="module", params=["sandwich", "pre", "post"])
def raven(request, tokenizer):
    model = tiny_raven(request.param, 91, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.grid(fast=1, slow=2)
@pytest.mark.parametrize("above", ["llama", "ouro"])
@pytest.mark.parametrize("policy", [Random(0.4, 3), Margin(0.1), Entropy(2.0)])
def test_at_full_depth_it_is_both_models_from_scratch(raven, looped, plain, tokenizer, policy, above):
    check_from_scratch([raven, plain if above == "llama" else looped[1]], tokenizer, TEXTS, 8, policy, FULL)


def by_rule(models, tokenizer, text, new, policy, eps, hysteresis):
    """The slow reference of a rule: depths of earlier codas are kept by position."""
    below, reference = models[0], Reference(models[0])
    ids, read, written = tokenizer(text)["input_ids"], [], []
    parking, record = Parking(hysteresis), Written()
    for position in range(new):
        rung = parking.start(0)
        climbed = False
        if rung == 0:
            read += [below.num_loops] * (len(ids) - 1 - len(read))
            with torch.no_grad():
                states = reference.model.transformer(torch.tensor([ids])).loop_states[:, 0]
                depth, logits = reference._stop(record, states, read, "converge", eps, 1)
            read.append(depth)
            signs = Signs(0, position, of_token(None, 0, None, 0.0), 0.0, margin_of(logits))
            if policy.fires(signs) is not None:
                rung, climbed = 1, True
        if rung == 1:
            logits = last_logits(models[1], ids, FULL)
        parking.wrote(0, rung, climbed, margin_of(logits))
        ids = [*ids, int(logits.argmax())]
        written.append((ids[-1], rung, depth if rung == 0 else None))
    return written, record.margin


@pytest.mark.grid(fast=1, slow=1)
@pytest.mark.parametrize("stay", [0, 2])
@pytest.mark.parametrize("policy", [Random(0.3, 5), Random(0.6, 8), Never()])
def test_under_a_rule_its_codas_stay_as_they_were_read(raven, plain, tokenizer, policy, stay):
    config, hysteresis = ExitConfig(mode="converge", eps=0.6), Hysteresis(stay=stay)
    models, depths = [raven, plain], set()
    ladder = ladder_of(models, tokenizer, policy, hysteresis)
    for text in TEXTS:
        # alone: a batch catches up together, so that a parked sequence is read along with the others
        generation = ladder.generate(text, max_new_tokens=9, exit_config=config)
        expected, margin = by_rule(models, tokenizer, text, 9, policy, 0.6, hysteresis)
        assert margin >= 1e-5, "a tie"
        assert told(generation) == [(token, rung) for token, rung, _ in expected]
        for token, (_, _, depth) in zip(generation.tokens, expected, strict=True):
            assert depth is None or token.depth == depth
        depths |= {depth for *_, depth in expected if depth is not None}
    assert len(depths) > 1


@pytest.mark.grid(fast=4, slow=6)
@pytest.mark.parametrize(("policy", "who"), [(Always(), 1), (Never(), 0)])
@pytest.mark.parametrize("after_exit", ["finish", "drop"])
def test_always_and_never_are_one_model_alone(raven, looped, tokenizer, policy, who, after_exit):
    models, config = [raven, looped[1]], ExitConfig(mode="margin", theta=0.1, after_exit=after_exit)
    result = ladder_of(models, tokenizer, policy).generate(TEXTS[0], max_new_tokens=10, exit_config=config)
    alone = sigma0.generate(models[who], tokenizer, TEXTS[0], max_new_tokens=10, exit_config=config)
    assert [(token.id, token.depth) for token in result.tokens] == [(token.id, token.depth) for token in alone.tokens]
    core = raven.transformer.core_block
    assert result.costs[0].parameters == 32 * 64 + sum(weight.numel() for weight in core.parameters())
    cost = result.costs[who]
    assert (cost.passes, cost.tokens) == (alone.loop_passes, 10)


@pytest.mark.parametrize("unit", ["draft", "answer"])
def test_whole_answers_go_up_too(raven, looped, tokenizer, unit):
    result = ladder_of([raven, looped[1]], tokenizer, None).generate(
        TEXTS[0], unit=unit, max_new_tokens=6, exit_config=ExitConfig(mode="margin", theta=0.1)
    )
    assert result.text and {cost.name for cost in result.costs} == {"0", "1"}
