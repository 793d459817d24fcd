"""Codas in the engine: recomputed in their order, and found again as full depth leaves them."""

import random

import pytest

from sigma0 import ExitConfig
from sigma0.serve.engine.messages import EngineRequest
from tests.decode.test_conformance import written
from tests.models.raven_reference import SHAPES, tiny_raven
from tests.serve.engine.test_conformance import served

NEW = 12


@pytest.fixture(params=SHAPES)
def model(request, pocket):
    model = tiny_raven(request.param, 23, vocab_size=pocket[0].config.vocab_size)
    model.generation_config.eos_token_id = None
    return model


def prompts_of(model, seed, count, longest):
    source = random.Random(seed)
    vocabulary = model.config.vocab_size
    return [[source.randrange(5, vocabulary) for _ in range(source.randint(1, longest))] for _ in range(count)]


def check(model, prompts, configs, found):
    for prompt, config, done in zip(prompts, configs, found, strict=True):
        out = written(model, [prompt], config, NEW)
        assert [token.id for token in done.tokens] == out.sequences[0, -NEW:].tolist(), config
        assert [token.depth for token in done.tokens] == out.exit_depths[0].tolist(), config


def asked(prompts, configs):
    pairs = zip(prompts, configs, strict=True)
    return [EngineRequest(tuple(prompt), NEW, config, on_collapse="ignore") for prompt, config in pairs]


@pytest.mark.grid(fast=0, slow=1)
def test_recomputed_codas_are_read_in_order(model, pocket):
    """Exits of an answer that differ are recomputed over all that lies before them, whatever loop that was read at."""
    rules = [
        ExitConfig(mode="kl", delta=0.1),
        ExitConfig(mode="minp-kl", delta=0.02),
        ExitConfig(mode="latent-diff", delta=0.5, after_exit="drop"),
        ExitConfig(mode="argmax-stability", stable=1),
    ]
    prompts, configs = prompts_of(model, 4, 24, 6), rules * 6
    found, engine = served(model, pocket[1], asked(prompts, configs), 9, watch=False)
    assert engine.status().preemptions > 6
    check(model, prompts, configs, found)


@pytest.mark.grid(fast=0, slow=1)
def test_blocks_found_again_are_those_of_full_depth(model, pocket):
    """A later request's prompt holds the first one's answer, whose codas were read at its exits."""
    early = ExitConfig(mode="margin", theta=0.1)
    prompt = (prompts_of(model, 3, 1, 20)[0] * 20)[:18]
    longer = [*prompt, *written(model, [prompt], early, NEW).sequences[0, -NEW:].tolist(), 7, 8]
    rules = [early, ExitConfig(mode="margin", theta=0.1, after_exit="verify"), ExitConfig(mode="full")]
    prompts, configs = [prompt] * 2 + [longer] * 3, [early, early, *rules]
    found, _ = served(model, pocket[1], asked(prompts, configs), 200, watch=False, together=1)
    assert sum(done.cached_tokens for done in found) > 16
    check(model, prompts, configs, found)
